"""The live view: a table that redraws itself in a terminal, and lines elsewhere (a log, CI)."""

import threading
from collections.abc import Sequence
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from cli.demo.comparison import Arm
from cli.demo.progress import Progress
from storage.registry import VersionSummary

REFRESH_SECONDS = 2.0
LINES_EVERY = 20  # requests between two lines where there is no terminal
STYLES = {"live": "green", "refused": "red", "rolled_back": "red"}


class View:
    """Shows `progress` for as long as the block runs."""

    def __init__(self, console: Console, progress: Progress, title: str) -> None:
        self._console, self._progress, self._title = console, progress, title
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._refresh, name="view", daemon=True)
        self._told: set[tuple[int, str]] = set()
        self._lines = 0

    def __enter__(self) -> "View":
        if self._live:
            self._live.start()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._over.set()
        self._thread.join()
        self._show()
        if self._live:
            self._live.stop()

    def _refresh(self) -> None:
        while not self._over.wait(REFRESH_SECONDS):
            self._show()

    def _show(self) -> None:
        if self._live:
            self._live.update(self._drawing(), refresh=True)
        else:
            self._print_news()

    def _drawing(self) -> RenderableType:
        done = len(self._progress.answers) + len(self._progress.failures)
        head = Text(f"{self._title}: {done}/{self._progress.wanted} requests", style="bold")
        return Group(head, traffic_table(self._progress), versions_table(self._progress.versions()))

    def _print_news(self) -> None:
        done = len(self._progress.answers)
        if done // LINES_EVERY > self._lines:
            self._lines = done // LINES_EVERY
            self._console.print(f"{done}/{self._progress.wanted} requests", highlight=False)
        for summary in self._progress.versions():
            news = (summary.version.number, summary.state)
            if news not in self._told:
                self._told.add(news)
                self._console.print(f"version {news[0]} is {news[1]}: {summary.reason}", highlight=False)


def traffic_table(progress: Progress) -> Table:
    table = Table("version", "workload", "requests", "acceptance rate", "acceptance length", title="traffic")
    for (version, workload), totals in progress.by_version().items():
        table.add_row(str(version), workload, str(totals.requests), f"{totals.rate:.3f}", f"{totals.length:.2f}")
    return table


def versions_table(versions: list[VersionSummary]) -> Table:
    table = Table("version", "state", "why", title="versions")
    for summary in versions:
        state = Text(summary.state, style=STYLES.get(summary.state, ""))
        table.add_row(str(summary.version.number), state, summary.reason)
    return table


def comparison_table(arms: Sequence[Arm]) -> Table:
    """Side by side; the three acceptance figures are three columns, and k stands beside them."""
    titles = ("arm", "k", "acceptance probability", "acceptance rate", "acceptance length", "tokens/s", "identical")
    table = Table(*titles, title="the same unseen prompts, temperature 0")
    for arm in arms:
        name = arm.arm if arm.version is None else f"{arm.arm} (version {arm.version})"
        figures = [_figure(arm.acceptance_probability), _figure(arm.acceptance_rate), _figure(arm.acceptance_length)]
        same = f"{arm.identical}/{arm.prompts}" + (f", {arm.near_ties} near-ties" if arm.near_ties else "")
        table.add_row(name, str(arm.k), *figures, f"{arm.tokens_per_second:.1f}", same)
    return table


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
