"""The curves of an adapt report as one picture: acceptance probability over requests, acceptance length below."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.adapt import AdaptReport
from benchmarks.curve import Row
from benchmarks.learning import FROZEN, OFFLINE, OSD, OSD_TUNED, REDRAFT

COLOURS = {FROZEN: "#888888", OSD: "#ff7f0e", OSD_TUNED: "#9467bd", REDRAFT: "#1f77b4", OFFLINE: "#2ca02c"}
SIZE = (11.0, 7.0)  # inches


def draw(report: AdaptReport, path: Path) -> None:
    """Write a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(2, 1, figsize=SIZE, sharex=True, layout="constrained")
    for arm in report.settings.arms:
        rows = [row for row in report.rows if row.arm == arm]
        _line(above, arm, rows, [row.curve for row in rows])
        _line(below, arm, rows, [row.length_curve for row in rows])
    _shifts((above, below), [row for row in report.rows if row.arm == report.settings.arms[0]])
    _promotions(above, report)
    above.set(ylabel="acceptance probability", ylim=(0.0, 1.0))
    below.set(ylabel=f"acceptance length at k={report.settings.draft_length}", xlabel="requests")
    figure.suptitle(
        f"moving mean of {report.settings.window} requests, anew at each shift; triangles: redraft promoted a version",
        fontsize=9,
    )
    figure.legend(*above.get_legend_handles_labels(), loc="outside lower center", ncols=len(COLOURS), fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _line(axis: Any, arm: str, rows: Sequence[Row], curves: Sequence[Sequence[float]]) -> None:
    """One arm; its curve begins anew at each shift, as its mean does."""
    start, colour = 0, COLOURS.get(arm)
    for i, (row, curve) in enumerate(zip(rows, curves, strict=True)):
        at = range(start, start + len(curve))
        style = "--" if arm == OFFLINE else "-"
        (drawn,) = axis.plot(at, curve, style, color=colour, linewidth=1.4, label=arm if i == 0 else None)
        colour = drawn.get_color()
        start += row.requests


def _shifts(axes: Sequence[Any], rows: Sequence[Row]) -> None:
    start = 0
    for row in rows:
        for axis in axes:
            axis.axvline(start, color="black", linewidth=0.6, linestyle=":")
        axes[0].text(start, 1.01, f" {row.workload}", transform=axes[0].get_xaxis_transform(), fontsize=8)
        start += row.requests


def _promotions(axis: Any, report: AdaptReport) -> None:
    """When redraft's versions went live."""
    at = [n.request for n in report.updates if n.arm == REDRAFT and n.update.outcome == "promoted"]
    axis.plot(at, [0.0] * len(at), "^", color=COLOURS[REDRAFT], markersize=5, clip_on=False)
