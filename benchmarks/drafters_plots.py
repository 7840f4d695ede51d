"""The plots of a report on drafters as SVG text: kinds beside one another, a panel for each workload."""

from collections.abc import Sequence
from typing import Any

from benchmarks.drafters_rows import CHAIN, COMBINED, GOVERNED, TREE, DrafterRow
from benchmarks.plots import as_svg, panels_of

COLOURS = {
    "causal_lm": "#1f77b4",
    "medusa": "#ff7f0e",
    "mtp": "#2ca02c",
    "eagle": "#d62728",
    "streaming": "#9467bd",
    "ngram": "#7f7f7f",
}
SHAPES = {CHAIN: 1.0, TREE: 0.65, GOVERNED: 0.4, COMBINED: 0.2}  # how strong a bar's colour is
MARKS = {CHAIN: "o", TREE: "^", GOVERNED: "s", COMBINED: "D"}


def plots(rows: Sequence[DrafterRow]) -> dict[str, str]:
    """SVG by title."""
    return {
        "Accepted progress against plain decoding": bars(rows, "speed_up", tuple(SHAPES), "speed-up"),
        "Acceptance length, chain and tree": bars(rows, "acceptance_length", (CHAIN, TREE), "tokens"),
        "Survival by position of chains": survival(rows),
        "What bounds it: tokens a round against the cost of a round (circle: chain, triangle: tree, square: governed, "
        "diamond: with n-grams; "
        "on the lines as fast as plain decoding, and twice as fast)": bounds(rows),
    }


def bars(rows: Sequence[DrafterRow], name: str, shapes: Sequence[str], label: str) -> str:
    """One figure by kind, a bar for each shape; the line at 1 is plain decoding."""
    panels = _by_workload(rows)
    figure, axes = panels_of(len(panels))
    for axis, (workload, found) in zip(axes, panels, strict=True):
        kinds = list(dict.fromkeys(row.kind for row in found))
        width = 0.8 / len(shapes)
        for i, shape in enumerate(shapes):
            here = [row for row in found if row.shape == shape and getattr(row, name) is not None]
            at = [kinds.index(row.kind) + (i - (len(shapes) - 1) / 2) * width for row in here]
            colours = [_colour(row.kind) for row in here]
            values = [getattr(row, name) for row in here]
            axis.bar(at, values, width * 0.9, color=colours, alpha=SHAPES[shape])
        axis.axhline(1.0, color="black", linewidth=0.8, linestyle=":")
        axis.set_xticks(range(len(kinds)), kinds, rotation=30, fontsize=8)
        axis.set(title=f"{workload}: {', '.join(shapes)}", ylabel=label)
    return as_svg(figure, axes)


def survival(rows: Sequence[DrafterRow]) -> str:
    """The share of rounds with a proposal that got past each position."""
    panels = _by_workload([row for row in rows if row.shape == CHAIN])
    figure, axes = panels_of(len(panels))
    for axis, (workload, found) in zip(axes, panels, strict=True):
        for row in found:
            shares = row.acceptance_by_position or ()
            axis.plot(range(1, len(shares) + 1), shares, marker="o", color=_colour(row.kind), label=row.kind)
        axis.set_xticks(range(1, max((row.k for row in found), default=1) + 1))
        axis.set(title=workload, xlabel="position", ylabel="share of rounds", ylim=(0, 1))
    return as_svg(figure, axes)


def bounds(rows: Sequence[DrafterRow]) -> str:
    """Above the first line a kind is faster than plain decoding, above the second twice as fast."""
    panels = _by_workload(rows)
    figure, axes = panels_of(len(panels))
    for axis, (workload, found) in zip(axes, panels, strict=True):
        end = 1.1 * max(row.round_cost for row in found)
        for times in (1, 2):
            axis.plot([0, end], [0, times * end], color="black", linewidth=0.8, linestyle=":")
        for row in found:
            label = row.kind if row.shape == CHAIN else None
            style: dict[str, Any] = {"marker": MARKS[row.shape], "color": _colour(row.kind), "label": label}
            axis.plot([row.round_cost], [row.tokens_per_round], linestyle="", **style)
        axis.set(title=workload, xlabel="cost of a round, target steps", ylabel="tokens a round")
        axis.set(xlim=(0, end), ylim=(0, 1.1 * max(row.tokens_per_round for row in found)))
    return as_svg(figure, axes)


def _by_workload(rows: Sequence[DrafterRow]) -> list[tuple[str, list[DrafterRow]]]:
    names = dict.fromkeys(row.workload for row in rows)
    return [(name, [row for row in rows if row.workload == name]) for name in names]


def _colour(kind: str) -> str:
    return COLOURS.get(kind, "black")
