"""What is left of a demo: `report.json` for programs, and a plot of acceptance over requests for people."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from cli.demo.comparison import Arm
from cli.demo.finale import Finale
from cli.demo.progress import Progress
from cli.demo.traffic import Answer
from storage.registry import VersionSummary

SMOOTHING = 12  # requests in the moving figure


@dataclass(frozen=True)
class VersionFigures:
    """A version, and what it showed on live traffic."""

    number: int
    state: str
    acceptance_probability: float | None  # on its holdout; None for version 1, which no gate saw
    acceptance_rate: float | None  # of its live requests; None where it served none
    acceptance_length: float | None
    reason: str


@dataclass(frozen=True)
class Report:
    """The demo's outcome. `shortfalls` says what did not happen; empty is success."""

    kind: str  # of drafter
    requests: int
    seconds: float
    versions: tuple[VersionFigures, ...]
    promoted: int
    refused: int
    rollback_ms: float
    forward_ms: float
    failed_requests: int
    comparison: tuple[Arm, ...]
    shortfalls: tuple[str, ...]


def report_of(kind: str, progress: Progress, finale: Finale, seconds: float) -> Report:
    """The report of a demo, with a sentence for each thing that should have happened and did not."""
    versions = tuple(version_figures(summary, progress.answers) for summary in progress.versions())
    promoted = sum(event.kind == "promote" for event in finale.events_before)
    refused = sum(v.reason.startswith("refused") for v in versions)
    return Report(
        kind=kind,
        requests=len(progress.answers) + len(progress.failures),
        seconds=seconds,
        versions=versions,
        promoted=promoted,
        refused=refused,
        rollback_ms=finale.back.milliseconds,
        forward_ms=finale.forward.milliseconds,
        failed_requests=len(progress.failures),
        comparison=finale.arms,
        shortfalls=tuple(_shortfalls(progress, finale, len(versions), promoted)),
    )


def _shortfalls(progress: Progress, finale: Finale, versions: int, promoted: int) -> Iterator[str]:
    _, first, last, governed = finale.arms
    if progress.failures:
        yield f"{len(progress.failures)} requests failed; the first: {progress.failures[0].error}"
    if versions < 3 or promoted < 2:
        yield f"{versions} versions were made and {promoted} promoted, not 3 and 2"
    for moved in (finale.back, finale.forward):
        if moved.missing or not moved.acknowledged:
            yield f"version {moved.version} was not acknowledged by {moved.missing or 'any server'}"
    if (last.acceptance_probability or 0.0) <= (first.acceptance_probability or 0.0):
        yield "the last version's acceptance probability is not above the first's"
    if (last.acceptance_length or 0.0) <= (first.acceptance_length or 0.0):
        yield "the last version's acceptance length is not above the first's"
    for arm in (first, last, governed):
        if arm.identical + arm.near_ties < arm.prompts:
            yield f"{arm.prompts - arm.identical - arm.near_ties} outputs of arm {arm.arm} differ from plain decoding"


def version_figures(summary: VersionSummary, answers: list[Answer]) -> VersionFigures:
    served = [a for a in answers if a.version == summary.version.number and a.rounds]
    proposed, accepted = sum(a.proposed for a in served), sum(a.accepted for a in served)
    return VersionFigures(
        number=summary.version.number,
        state=summary.state,
        acceptance_probability=summary.evaluation.overall.candidate_probability if summary.evaluation else None,
        acceptance_rate=accepted / proposed if served else None,
        acceptance_length=1 + accepted / sum(a.rounds for a in served) if served else None,
        reason=summary.reason,
    )


def write(report: Report, answers: list[Answer], folder: Path) -> None:
    """`report.json` and `acceptance.png` in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.json").write_text(json.dumps(asdict(report), indent=2) + "\n", encoding="utf-8")
    plot([a for a in answers if a.rounds], folder / "acceptance.png")


def plot(answers: list[Answer], path: Path) -> None:
    """Acceptance length over requests: each request a dot, their moving mean a line, each version change a mark."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lengths = np.array([1 + a.accepted / a.rounds for a in answers])
    figure, axes = pyplot.subplots(figsize=(10, 5), dpi=120)
    for workload in dict.fromkeys(a.workload for a in answers):
        at = [i for i, a in enumerate(answers) if a.workload == workload]
        axes.scatter(at, lengths[at], s=14, alpha=0.5, label=f"{workload}: one request")
    window = min(SMOOTHING, len(lengths))
    moving = np.convolve(lengths, np.ones(window) / window, mode="valid")
    axes.plot(np.arange(window - 1, len(lengths)), moving, color="black", label=f"mean of {window} requests")
    for i, (before, after) in enumerate(pairwise(answers), start=1):
        if after.version is not None and before.version is not None and after.version > before.version:
            axes.axvline(i, color="grey", linestyle="--", linewidth=0.8)
            axes.annotate(f"v{after.version}", (i, axes.get_ylim()[1]), fontsize=8, ha="left", va="top")
    axes.set(xlabel="requests finished", ylabel="acceptance length", title="The drafter learns from the traffic")
    axes.legend(loc="upper left")
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
