"""`redraft history`: acceptance over time, by version and workload, and what was live when."""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

import typer

from cli.acceptance import COLUMNS, cells, total
from cli.opened import DrafterOption, JsonOption, open_drafter
from cli.output import plain, show_json, sparkline, table
from cli.show import EVENT_COLUMNS, event_cells
from storage.history import AcceptanceRow

BARS = 40  # newest minutes in a line
NO_TRAFFIC = "no traffic was folded into the history: send requests, and see that housekeeper and beat run"


def history(
    drafter: DrafterOption = "",
    workload: Annotated[str, typer.Option(help="only this workload")] = "",
    hours: Annotated[float | None, typer.Option(help="only the last hours", min=0)] = None,
    events: Annotated[int, typer.Option(help="moves of the live pointer to show", min=0)] = 20,
    json: JsonOption = False,
) -> None:
    """Show acceptance over time, and the moves of the live pointer."""
    from storage.history import history as acceptance_history

    opened = open_drafter(drafter)
    name = opened.drafter.name
    since = None if hours is None else datetime.now(UTC) - timedelta(hours=hours)
    rows = [r for r in acceptance_history(opened.database, name, since) if workload in ("", r.workload)]
    moves = opened.registry.events(name, events)
    if json:
        show_json({"rows": [_flat(row) for row in rows], "events": moves, "intervals": opened.registry.intervals(name)})
        return
    columns = ("version", "workload", "policy", *COLUMNS, "acceptance length by minute")
    table(f"acceptance of {name} in live traffic", columns, _lines(rows), right=("version", *COLUMNS), empty=NO_TRAFFIC)
    table("\nmoves of the live pointer, newest first (UTC)", EVENT_COLUMNS, [event_cells(move) for move in moves])


def _flat(row: AcceptanceRow) -> dict[str, Any]:
    rates = {"acceptance_rate": row.acceptance_rate, "acceptance_length": row.acceptance_length}
    return {**plain(row), **rates, "lossless": row.lossless}


def _lines(rows: Sequence[AcceptanceRow]) -> list[tuple[str, ...]]:
    """One line a version, workload and policy, with a bar a minute."""
    groups: dict[tuple[int, str, str], list[AcceptanceRow]] = {}
    for row in rows:
        groups.setdefault((row.version, row.workload, row.policy), []).append(row)
    return [
        (str(version), workload, policy, *cells(total(found)), sparkline(_by_minute(found)[-BARS:]))
        for (version, workload, policy), found in sorted(groups.items())
    ]


def _by_minute(rows: Sequence[AcceptanceRow]) -> list[float]:
    """Acceptance length of each minute with traffic, oldest first; rows of different k are taken together."""
    minutes: dict[datetime, list[AcceptanceRow]] = {}
    for row in rows:
        minutes.setdefault(row.bucket, []).append(row)
    lengths = (total(minutes[minute]).acceptance_length for minute in sorted(minutes))
    return [length for length in lengths if length is not None]
