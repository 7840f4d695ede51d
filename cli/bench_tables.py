"""The tables that `redraft bench` prints."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from cli.output import figure, number_or_dash, pairs, say, table

if TYPE_CHECKING:
    from benchmarks.curve import Row as LearnedRow
    from benchmarks.feedback import FeedbackRow
    from benchmarks.figures import Row
    from benchmarks.grid import Cell, GridReport
    from benchmarks.soak import SoakReport

FIGURES = {  # by column: the row's figure and its digits
    "rate": ("acceptance_rate", 3),
    "length": ("acceptance_length", 2),
    "draft ms": ("draft_ms", 2),
    "verify ms": ("verify_ms", 2),
    "latency ms": ("latency_ms", 0),
    "p95": ("latency_p95_ms", 0),
    "tokens/s": ("tokens_per_second", 1),
    "progress": ("accepted_progress", 4),
    "speed-up": ("speed_up", 2),
    "ideal": ("ideal_speed_up", 2),
    "of ideal": ("ratio_to_ideal", 2),
    "of best": ("ratio_to_best", 2),
}
COLUMNS = ("arm", "k", *FIGURES, "same as plain", "speculation")
LEGEND = (
    "rate, length: of acceptance; progress: accepted tokens a ms of rounds; speed-up: its ratio to plain; "
    "of best: governed against the best fixed k"
)


def show_decode(rows: "Sequence[Row]") -> None:
    """A table for each workload, temperature and batch, with the figures that fit; the file has all of them."""
    from benchmarks.figures import without_repeats

    cells: dict[str, list[Row]] = {}
    for row in without_repeats(rows):
        cells.setdefault(f"{row.workload}, temperature {row.temperature:g}, batch {row.batch}", []).append(row)
    for title, found in cells.items():
        table(f"\n{title}", COLUMNS, [_cells(row) for row in found], right=("k", *FIGURES))
    say(f"\n{LEGEND}")


def _cells(row: "Row") -> tuple[str, ...]:
    k = str(row.k) if row.has_draft_length else "-"
    figures = [figure(getattr(row, name), digits) for name, digits in FIGURES.values()]
    return row.arm, k, *figures, _same(row), row.verdict or "-"


def _same(row: "Row") -> str:
    if row.identical is None:
        return "-"
    said = f"{row.identical}/{row.requests * row.repeats}"
    said += f", {row.near_ties} near-ties" if row.near_ties else ""
    return said + (f", {row.different} DIFFER" if row.different else "")


def show_feedback(rows: "Sequence[FeedbackRow]") -> None:
    columns = ("batch", "tokens/s with feedback", "without", "ratio", "of neighbours", "lost")
    lines = [
        (
            str(row.batch),
            figure(row.tokens_per_second_on, 1),
            figure(row.tokens_per_second_off, 1),
            figure(row.ratio, 4),
            figure(row.paired_ratio, 4),
            f"{100 * (1 - row.paired_ratio):.1f} %",
        )
        for row in rows
    ]
    table("feedback on against off, medians of runs in turn", columns, lines, right=columns)


def show_soak(report: "SoakReport") -> None:
    memory = report.memory
    lines = [
        ("requests", f"{report.requests}, {report.failed} failed"),
        ("stuck slots", str(report.stuck_slots)),
        ("tokens/s without the slow reader", figure(report.tokens_per_second_without_slow, 1)),
        ("tokens/s with it", figure(report.tokens_per_second_with_slow, 1)),
    ]
    if memory is not None:
        sizes = (
            f"{memory.start:.0f} MB at the start, {memory.after_warm_up:.0f} after warm-up, {memory.end:.0f} at the end"
        )
        lines.append(("resident memory", f"{sizes}; {memory.slope_per_minute:+.1f} MB a minute"))
    pairs(f"{report.settings.clients} clients for {report.settings.seconds:g} s", lines)


def show_adapt(rows: "Sequence[LearnedRow]") -> None:
    """A table for each workload, in the order of the shifts."""
    columns = ("arm", "ceiling", "start", "end", "to 90 %", "forgotten", "length", "updates", "promoted", "training s")
    workloads = list(dict.fromkeys(row.workload for row in rows))
    for workload in workloads:
        lines = [
            (
                row.arm,
                figure(row.ceiling),
                figure(row.start),
                figure(row.end),
                "never"
                if row.ceiling is not None and row.requests_to_90 is None
                else number_or_dash(row.requests_to_90),
                figure(row.forgotten),
                f"{figure(row.start_length, 2)} -> {figure(row.end_length, 2)}",
                str(row.updates),
                str(row.promotions),
                figure(row.training_seconds, 1),
            )
            for row in rows
            if row.workload == workload
        ]
        table(f"\n{workload}", columns, lines, right=columns[1:])
    say(
        "\nceiling, start, end, forgotten: acceptance probability; to 90 %: requests after the shift until it stays at "
        "or above 90 % of the ceiling; length: of acceptance, from the start to the end of the segment"
    )


def show_grid(report: "GridReport") -> None:
    """Losses and positions against workloads: acceptance probability on held-out requests, the best with a star."""
    workloads = list(dict.fromkeys(row.workload for row in report.rows))
    cells = {(f"{row.loss}/{row.positions}", row.workload): row for row in report.rows}
    ways = list(dict.fromkeys(way for way, _ in cells))
    lines = [("version 1", *(figure(cells[ways[0], workload].before) for workload in workloads))]
    for way in ways:
        lines.append((way, *(_grid_cell(cells[way, w], report.winners[w] == way) for w in workloads)))
    table("acceptance probability on held-out requests", ("loss/positions", *workloads), lines, right=workloads)
    say(f"best over all workloads: {report.winners['all']}")


def _grid_cell(cell: "Cell", best: bool) -> str:
    return "failed" if cell.failed else figure(cell.probability) + (" *" if best else "  ")
