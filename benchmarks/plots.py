"""The plots of a decode report as SVG text, drawn by matplotlib; each compares arms within one cell and never
across cells.
"""

import io
import re
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from benchmarks.figures import DRAFTING, Row

COLOURS = {
    "plain": "#444444",
    "speculative": "#1f77b4",
    "governed": "#2ca02c",
    "hf_plain": "#bbbbbb",
    "hf_assisted": "#ff7f0e",
}
COLUMNS = 4
WIDTH, HEIGHT = 3.6, 2.7  # inches of one panel
Cell = tuple[str, float, int]  # workload, temperature, batch


def plots(rows: Sequence[Row]) -> dict[str, str]:
    """SVG by title."""
    return {
        "Tokens per second by batch": tokens_by_batch(rows),
        "Speed-up by k": by_k(rows, "speed_up", DRAFTING, "accepted progress / plain"),
        "Survival by position": survival(rows),
        "Ratio reached to the ideal speed-up": by_k(rows, "ratio_to_ideal", ("speculative",), "speed-up / ideal"),
    }


def tokens_by_batch(rows: Sequence[Row]) -> str:
    """A panel for each workload and temperature; an arm with several k stands with its fastest."""
    panels = _grouped(rows, lambda row: (row.workload, row.temperature))
    figure, axes = panels_of(len(panels))
    for axis, ((workload, temperature), found) in zip(axes, panels, strict=True):
        batches = sorted({row.batch for row in found})
        for i, arm in enumerate(COLOURS):
            best = [_fastest(found, arm, batch) for batch in batches]
            at = [j + (i - 2) * 0.16 for j, speed in enumerate(best) if speed is not None]
            axis.bar(at, [speed for speed in best if speed is not None], 0.16, label=arm, color=COLOURS[arm])
        axis.set_xticks(range(len(batches)), [str(batch) for batch in batches])
        axis.set(title=f"{workload}, temperature {temperature:g}", xlabel="batch", ylabel="tokens/s")
    return as_svg(figure, axes)


def by_k(rows: Sequence[Row], name: str, arms: Sequence[str], label: str) -> str:
    """One figure over k, a panel for each cell; the line at 1 is plain decoding, or the ideal."""
    panels = _grouped(rows, _cell)
    figure, axes = panels_of(len(panels))
    for axis, (cell, found) in zip(axes, panels, strict=True):
        axis.axhline(1.0, color="black", linewidth=0.8, linestyle=":")
        for arm in arms:
            points = [(row.k, getattr(row, name)) for row in found if row.arm == arm and getattr(row, name) is not None]
            if points:
                axis.plot(*zip(*points, strict=True), marker="o", label=arm, color=COLOURS[arm])
        axis.set_xticks(sorted({row.k for row in found}))
        axis.set(title=_title(cell), xlabel="k", ylabel=label)
    return as_svg(figure, axes)


def survival(rows: Sequence[Row]) -> str:
    """The share of rounds that got past each position, at the largest fixed k."""
    panels = _grouped([row for row in rows if row.arm == "speculative"], _cell)
    figure, axes = panels_of(len(panels))
    for axis, (cell, found) in zip(axes, panels, strict=True):
        longest = max(found, key=lambda row: row.k)
        shares = longest.acceptance_by_position or ()
        axis.plot(range(1, len(shares) + 1), shares, marker="o", color=COLOURS["speculative"], label=f"k={longest.k}")
        axis.set_xticks(range(1, len(shares) + 1))
        axis.set(title=_title(cell), xlabel="position", ylabel="share of rounds", ylim=(0, 1))
    return as_svg(figure, axes)


def _cell(row: Row) -> Cell:
    return row.workload, row.temperature, row.batch


def _title(cell: Cell) -> str:
    return f"{cell[0]}, temperature {cell[1]:g}, batch {cell[2]}"


def _grouped(rows: Sequence[Row], key: Any) -> list[tuple[Any, list[Row]]]:
    return [(name, list(found)) for name, found in groupby(sorted(rows, key=key), key)]


def _fastest(rows: Sequence[Row], arm: str, batch: int) -> float | None:
    speeds = [row.tokens_per_second for row in rows if (row.arm, row.batch) == (arm, batch)]
    return max(speeds, default=None)


def panels_of(count: int) -> tuple[Any, Sequence[Any]]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lines = max(-(-count // COLUMNS), 1)
    columns = max(min(count, COLUMNS), 1)
    figure, axes = pyplot.subplots(lines, columns, figsize=(WIDTH * columns, HEIGHT * lines), squeeze=False)
    flat = list(axes.flat)
    for axis in flat[count:]:
        axis.set_axis_off()
    return figure, flat[:count]


def as_svg(figure: Any, axes: Sequence[Any]) -> str:
    """The figure as an SVG element, its text left as text."""
    from matplotlib import pyplot, rc_context

    for axis in axes:
        axis.title.set_fontsize(9)
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize=7)
    figure.tight_layout()
    out = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "redraft"}):
        figure.savefig(out, format="svg", metadata={"Date": None})
    pyplot.close(figure)
    return re.sub(r"^.*?(?=<svg )", "", out.getvalue(), flags=re.DOTALL)
