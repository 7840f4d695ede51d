"""`redraft versions`: what was made, what became of it and why."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any

from cli.acceptance import COLUMNS, Acceptance, cells, lossy_requests, of_version
from cli.opened import DrafterOption, JsonOption, Opened, open_drafter
from cli.output import age, figure, number_or_dash, plain, say, show_json, table, warn

if TYPE_CHECKING:
    from storage.history import AcceptanceRow
    from storage.registry import Pointer, VersionSummary

EVENTS = 10_000  # moves of the pointer that are looked at
ORDER = {"live": 0, "canary": 2, "candidate": 3}  # 1 is the previous version, 4 all others


@dataclass(frozen=True)
class VersionRow:
    """A version as the list shows it; acceptance probability is the gate's, on the holdout."""

    number: int
    state: str
    previous: bool  # what `redraft rollback` goes back to
    parent: int | None
    reason: str
    acceptance_probability: float | None
    live: Acceptance  # of what was verified exactly
    lossy_requests: int  # beside it
    created_at: datetime
    size_bytes: int
    weights_sha256: str
    weights_deleted: bool  # for their age: `redraft reproduce N --restore` may make them again
    pinned: bool


def versions(drafter: DrafterOption = "", json: JsonOption = False) -> None:
    """List the drafter's versions: what is live first, then what it would roll back to."""
    from storage import target_changes

    opened = open_drafter(drafter)
    rows, stopped = version_rows(opened), target_changes.stopped(opened.database).get(opened.drafter.name)
    if json:
        show_json([{**_flat(row), "stopped": stopped and stopped.reason} for row in rows])
        return
    columns = ("version", "state", "parent", "acceptance probability", *COLUMNS, "age", "reason")
    cells_of = [
        (str(r.number), _state(r), number_or_dash(r.parent), figure(r.acceptance_probability), *cells(r.live),
         age(r.created_at), r.reason)
        for r in rows
    ]  # fmt: skip
    table(f"versions of {opened.drafter.name}", columns, cells_of, right=(columns[0], *columns[2:-1]))
    if stopped:
        warn(stopped.reason)
    if lossy := [f"{r.lossy_requests} of version {r.number}" for r in rows if r.lossy_requests]:
        say(f"not among these figures: requests that were verified lossily ({', '.join(lossy)}): see `redraft history`")


def version_rows(opened: Opened) -> list[VersionRow]:
    """All versions in the order of the list."""
    from storage import history

    name = opened.drafter.name
    pointer, traffic = opened.registry.pointer(name), history.by_version(opened.database, name)
    summaries = opened.registry.versions(name)
    rows = [_row(s, pointer, traffic) for s in summaries]
    successors = {e.before: e.after for e in reversed(opened.registry.events(name, limit=EVENTS)) if e.before}
    return sorted((_with_successor(row, successors) for row in rows), key=_place)


def _row(summary: "VersionSummary", pointer: "Pointer", traffic: Sequence["AcceptanceRow"]) -> VersionRow:
    version, evaluation = summary.version, summary.evaluation
    return VersionRow(
        number=version.number,
        state=summary.state,
        previous=pointer.previous is not None and pointer.previous.number == version.number,
        parent=version.parent,
        reason=summary.reason,
        acceptance_probability=evaluation.overall.candidate_probability if evaluation else None,
        live=of_version(traffic, version.number),
        lossy_requests=lossy_requests(traffic, version.number),
        created_at=version.created_at,
        size_bytes=version.size_bytes,
        weights_sha256=version.weights_sha256,
        weights_deleted=summary.weights_deleted,
        pinned=summary.pinned,
    )


def _with_successor(row: VersionRow, successors: dict[int, int]) -> VersionRow:
    """A retired version's own reason is that of the move which replaced it, so name what came instead."""
    if row.state != "retired" or row.number not in successors:
        return row
    return replace(row, reason=f"replaced by version {successors[row.number]}")


def _place(row: VersionRow) -> tuple[int, int]:
    if row.previous:
        return 1, 0
    return ORDER.get(row.state, 4), -row.number


def _state(row: VersionRow) -> str:
    also = {"previous": row.previous, "pinned": row.pinned, "weights deleted": row.weights_deleted}
    return ", ".join([row.state, *(word for word, holds in also.items() if holds)])


def _flat(row: VersionRow) -> dict[str, Any]:
    fields: dict[str, Any] = plain(row)
    live = fields.pop("live")
    return {**fields, **live}
