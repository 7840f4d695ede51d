"""`redraft show`: the card of one version, from SQL alone."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.acceptance import COLUMNS, Acceptance, as_json, by_workload, cells
from cli.drift import alarm_json
from cli.opened import DrafterOption, JsonOption, Opened, open_drafter
from cli.output import age, figure, number_or_dash, pairs, plain, show_json, size, table

if TYPE_CHECKING:
    from storage.decisions import Evaluation, TrainingReport, WorkloadScore
    from storage.drift import Alarm
    from storage.registry import Drafter, Event, Interval, VersionSummary
    from storage.windows import Window


@dataclass(frozen=True)
class Card:
    """All that is known of a version."""

    drafter: "Drafter"
    summary: "VersionSummary"
    training: "TrainingReport | None"  # None for a version 1
    window: "Window | None"  # what it was trained on; None for a version 1
    alarms: "tuple[Alarm, ...]"  # of drift, that this window answers
    intervals: "tuple[Interval, ...]"  # when it was live
    events: "tuple[Event, ...]"  # moves of the pointer to it or away from it, newest first
    acceptance: dict[tuple[str, str], Acceptance]  # live traffic by (workload, policy)


def show(
    number: Annotated[int, typer.Argument(metavar="N", help="number of the version")],
    drafter: DrafterOption = "",
    json: JsonOption = False,
) -> None:
    """Show one version: where it comes from, how it was judged, when it was live, what it accepted."""
    card = version_card(open_drafter(drafter), number)
    if json:
        show_json(card_json(card))
    else:
        _print(card)


def version_card(opened: Opened, number: int) -> Card:
    """The card of version `number`; raises `UnknownVersion`."""
    from storage import history
    from storage.drift import DriftStore
    from storage.weights import WeightsStore
    from storage.windows import Windows

    name, registry = opened.drafter.name, opened.registry
    version, window, alarms = registry.version(name, number), None, []
    if version.window_id is not None:
        window = Windows(opened.database, WeightsStore(opened.config.weights_folder)).window(version.window_id)
        alarms = DriftStore(opened.database).alarms(name, window_id=window.id)
    return Card(
        drafter=opened.drafter,
        summary=next(s for s in registry.versions(name) if s.version.number == number),
        training=registry.training(version),
        window=window,
        alarms=tuple(alarms),
        intervals=tuple(i for i in registry.intervals(name) if i.version == number),
        events=tuple(e for e in registry.events(name, limit=1000) if number in (e.before, e.after)),
        acceptance=by_workload(history.by_version(opened.database, name), number),
    )


def card_json(card: Card) -> dict[str, Any]:
    """The card as one object."""
    summary = card.summary
    return {
        **plain(summary.version),
        "state": summary.state,
        "reason": summary.reason,
        "weights_deleted": summary.weights_deleted,
        "pinned": summary.pinned,
        "kind": card.drafter.kind,
        "target_fingerprint": card.drafter.target_fingerprint,
        "training": card.training,
        "window": _window_json(card),
        "evaluation": summary.evaluation,
        "intervals": card.intervals,
        "events": card.events,
        "acceptance": as_json(card.acceptance),
    }


def _window_json(card: Card) -> dict[str, Any] | None:
    return {**plain(card.window), "alarms": [alarm_json(a) for a in card.alarms]} if card.window else None


def _print(card: Card) -> None:
    summary, version = card.summary, card.summary.version
    deleted = ", deleted" if summary.weights_deleted else ""
    pairs(
        f"version {version.number} of {card.drafter.name}: {summary.state}",
        [
            ("reason", summary.reason or "-"),
            ("parent", number_or_dash(version.parent)),
            ("window", _window(card)),
            ("made", f"{version.created_at:%Y-%m-%d %H:%M:%S} UTC, {age(version.created_at)} ago"),
            ("weights", f"sha256 {version.weights_sha256}, {size(version.size_bytes)}{deleted}"),
            ("target", card.drafter.target_fingerprint),
        ],
    )
    if card.training:
        _print_training(card.training)
    if summary.evaluation:
        _print_evaluation(summary.evaluation)
    _print_life(card)


def _window(card: Card) -> str:
    """The window in one line: why it was started, what is in it, what was kept out; then the alarms behind it."""
    window = card.window
    if window is None:
        return "-"
    left_out = ", ".join(f"{records} {guard.replace('_', ' ')}" for guard, records in window.left_out.items())
    lines = [
        f"{window.id}{window.cause and f', started by {window.cause}'}: "
        f"{window.training} training, {window.holdout} holdout" + (f"; left out: {left_out}" if left_out else ""),
        *(f"{alarm.at:%F %T} {alarm.finding.reason}" for alarm in card.alarms),
    ]
    return "\n".join(lines)


TEACHERS = {
    "logged": "rows logged while serving",
    "rescored": "the target, which scored the records again",
    "engine": "a serving engine, which scored the records off-peak",
}


def _print_training(run: "TrainingReport") -> None:
    settings = ", ".join(f"{name} {value}" for name, value in run.config.items())
    amount = f"{run.records} records ({run.replayed} replayed), {run.positions} positions"
    lines = [
        ("teacher", TEACHERS.get(run.teacher, run.teacher)),
        ("data", f"{amount}, {run.passes} passes, {run.steps} steps, {run.seconds:.1f} s"),
        ("loss", f"{figure(run.first_loss)} -> {figure(run.last_loss)}"),
        ("draft vocabulary", f"covers {_share(run.mass_covered)} of the target's mass, {_share(run.tokens_covered)} of "
         "the emitted tokens"),
        ("settings", settings),
    ]  # fmt: skip
    if run.set_aside_losses:
        lines.insert(3, ("loss set aside", " -> ".join(map(figure, run.set_aside_losses))))
    if run.novelty is not None:
        lines.insert(3, ("novelty", f"{run.novelty:.2f}: the parent's loss on the window / on replayed records"))
    pairs("\ntraining", lines)


def _share(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def _print_evaluation(evaluation: "Evaluation") -> None:
    """Parent and candidate on the same holdout."""
    columns = (
        "workload",
        "policy",
        "requests",
        "acceptance probability",
        "gain",
        f"acceptance length (k={evaluation.k})",
    )
    rows = [_score(score) for score in (*evaluation.scores, evaluation.overall)]
    table("\nthe gate's evaluation, parent -> this version", columns, rows, right=columns[2:])


def _score(score: "WorkloadScore") -> tuple[str, ...]:
    return (
        score.workload,
        score.policy,
        str(score.requests),
        f"{figure(score.parent_probability)} -> {figure(score.candidate_probability)}",
        f"{score.gain:+.3f} [{score.gain_low:+.3f}, {score.gain_high:+.3f}]",
        f"{figure(score.parent_length, 2)} -> {figure(score.candidate_length, 2)}",
    )


def _print_life(card: Card) -> None:
    if card.acceptance:
        rows = [(workload, policy, *cells(found)) for (workload, policy), found in card.acceptance.items()]
        table("\nlive traffic", ("workload", "policy", *COLUMNS), rows, right=COLUMNS)
    if card.intervals:
        spans = [
            (str(i.generation), f"{i.started_at:%F %T}", f"{i.ended_at:%F %T}" if i.ended_at else "now")
            for i in card.intervals
        ]
        table("\nlive (UTC)", ("generation", "from", "to"), spans)
    table("\nevents (UTC)", EVENT_COLUMNS, [event_cells(event) for event in card.events])


EVENT_COLUMNS = ("at", "what", "from", "to", "generation", "by", "reason")


def event_cells(event: "Event") -> tuple[str, ...]:
    """A move of the pointer under `EVENT_COLUMNS`."""
    return (
        f"{event.at:%F %T}",
        event.kind,
        number_or_dash(event.before),
        str(event.after),
        str(event.generation),
        event.actor,
        event.reason,
    )
