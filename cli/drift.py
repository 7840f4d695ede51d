"""`redraft drift`: falls of acceptance and new workloads, what became of them, and what the guards left out."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.opened import DrafterOption, JsonOption, Opened, open_drafter
from cli.output import age, figure, number_or_dash, plain, show_json, table

if TYPE_CHECKING:
    from storage.drift import Alarm, SeriesView
    from storage.left_out import LeftOut

NO_ALARMS = "no alarms: no workload's acceptance has fallen, and none is new"
ALARM_COLUMNS = ("at", "what", "workload", "policy", "version", "before", "after", "requests", "update", "reason")
SERIES_COLUMNS = ("workload", "policy", "version", "acceptance probability", "requests", "evidence of a fall", "seen")


@dataclass(frozen=True)
class Drifted:
    """All that the command shows."""

    alarms: "Sequence[Alarm]"  # newest first
    counts: dict[str, int]  # of all that are kept, by kind
    pending: bool  # a fall awaits its update
    series: "Sequence[SeriesView]"
    left_out: "Sequence[LeftOut]"


def drift(
    drafter: DrafterOption = "",
    alarms: Annotated[int, typer.Option(help="alarms to show", min=0)] = 20,
    json: JsonOption = False,
) -> None:
    """Show drift by workload: alarms with their cause, how each series stands, what was kept out of training."""
    opened = open_drafter(drafter)
    found = _drifted(opened, alarms)
    if json:
        show_json(_as_json(found))
        return
    name = opened.drafter.name
    cells = [alarm_cells(alarm) for alarm in found.alarms]
    title = f"drift of {name}: {found.counts['fall']} falls, {found.counts['novel']} new workloads, newest first (UTC)"
    table(title, ALARM_COLUMNS, cells, right=ALARM_COLUMNS[4:8], empty=NO_ALARMS)
    table("\nseries of the live version", SERIES_COLUMNS, [_series(s) for s in found.series], right=SERIES_COLUMNS[2:])
    kept_out = [(f.guard, str(f.records), f"{f.at:%F %T}", f.reason) for f in found.left_out]
    if kept_out:
        table("\nkept out of training", ("guard", "records", "last", "last reason"), kept_out, right=("records",))


def alarm_cells(alarm: "Alarm") -> tuple[str, ...]:
    """An alarm under `ALARM_COLUMNS`."""
    f = alarm.finding
    update = f"window {alarm.window_id}" if alarm.window_id is not None else "awaited" if f.kind == "fall" else "-"
    return (
        f"{alarm.at:%F %T}",
        f.kind,
        f.workload,
        f.policy,
        number_or_dash(f.version),
        figure(f.before),
        figure(f.after),
        str(f.requests),
        update,
        f.reason,
    )


def _drifted(opened: Opened, limit: int) -> Drifted:
    from storage import left_out
    from storage.drift import DriftStore

    store, name = DriftStore(opened.database), opened.drafter.name
    totals = left_out.totals(opened.database, name)
    return Drifted(store.alarms(name, limit), store.counts(name), store.pending(name), store.series(name), totals)


def _series(view: "SeriesView") -> tuple[str, ...]:
    at = _standing(view)
    return (
        view.workload,
        view.policy,
        str(view.version),
        figure(at["acceptance_probability"]),
        str(view.requests),
        figure(at["evidence"], 1),
        age(view.last_seen),
    )


def _standing(view: "SeriesView") -> dict[str, Any]:
    """A series as one flat object."""
    from adapter.drift import Detector

    detector = Detector(**view.state)
    return {
        "workload": view.workload,
        "policy": view.policy,
        "version": view.version,
        "requests": view.requests,
        "acceptance_probability": detector.level,
        "evidence": detector.evidence,
        "last_seen": view.last_seen,
    }


def alarm_json(alarm: "Alarm") -> dict[str, Any]:
    """An alarm as one flat object."""
    return {**plain(alarm.finding), "id": alarm.id, "at": alarm.at, "window_id": alarm.window_id}


def _as_json(found: Drifted) -> dict[str, Any]:
    return {
        "alarms": [alarm_json(alarm) for alarm in found.alarms],
        "counts": found.counts,
        "pending": found.pending,
        "series": [_standing(view) for view in found.series],
        "left_out": found.left_out,
    }
