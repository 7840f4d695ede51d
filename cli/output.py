"""What every command prints with: tables for people, JSON for programs, one red line for an error."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, is_dataclass
from datetime import UTC, datetime
from math import isfinite
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

OURS = ("cli", "benchmarks", "service", "worker", "adapter", "storage", "migrations")
PIPED_WIDTH = 160  # columns where the output is no terminal, so that tables are not folded for a reader like grep
BARS = "▁▂▃▄▅▆▇█"


class CommandError(RuntimeError):
    """A command cannot do what was asked; the message says what to do."""


def console(stderr: bool = False) -> Console:
    """A console on the stream as it is now (tests and pipes replace it)."""
    stream = sys.stderr if stderr else sys.stdout
    return Console(file=stream, width=None if stream.isatty() else PIPED_WIDTH, highlight=False)


def say(line: str) -> None:
    """One line for the reader; square brackets are text, not markup."""
    console().print(line, markup=False, soft_wrap=True)


def warn(line: str) -> None:
    console(stderr=True).print(f"warning: {line}", style="yellow", markup=False, soft_wrap=True)


def fail(line: str) -> None:
    console(stderr=True).print(f"error: {line}", style="red", markup=False, soft_wrap=True)


def show_json(value: Any) -> None:
    """Records, or lists and dicts of them, as indented JSON."""
    sys.stdout.write(json.dumps(plain(value), indent=2, ensure_ascii=False, default=str) + "\n")


def as_json(value: Any) -> str:
    """The same, as the text of a file."""
    return json.dumps(plain(value), indent=2, ensure_ascii=False) + "\n"


def write(path: Path | None, text: str) -> None:
    """A file that was asked for, in a folder that is made where it is missing."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        say(f"wrote {path}")


def plain(value: Any) -> Any:
    """Records as objects, times in ISO 8601, and null for what is no number."""
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, float) and not isfinite(value):
        return None
    return str(value) if isinstance(value, Path) else value


def table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str] = (), empty: str = ""
) -> None:
    """Print rows under `columns`; those named in `right` are figures. `empty` stands for no rows."""
    if not rows and empty:
        say(empty)
        return
    view = Table(title=title, title_justify="left", header_style="bold", box=None, pad_edge=False)
    for name in columns:
        view.add_column(name, justify="right" if name in right else "left", overflow="fold")
    for row in rows:
        view.add_row(*row)
    console().print(view)


def pairs(title: str, rows: Sequence[tuple[str, str]]) -> None:
    """Print names and values, one pair a line."""
    view = Table(title=title, title_justify="left", show_header=False, box=None, pad_edge=False)
    view.add_column(style="dim")
    view.add_column(overflow="fold")
    for row in rows:
        view.add_row(*row)
    console().print(view)


def age(moment: datetime | None) -> str:
    """How long ago, in the largest unit that fits."""
    if moment is None:
        return "-"
    seconds = max((datetime.now(UTC) - moment).total_seconds(), 0)
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def figure(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def size(count: int) -> str:
    """Bytes in the largest unit that fits."""
    for unit, of in (("MB", 1e6), ("kB", 1e3)):
        if count >= of:
            return f"{count / of:.1f} {unit}"
    return f"{count} B"


def number_or_dash(number: int | None) -> str:
    return "-" if number is None else str(number)


def sparkline(values: Sequence[float]) -> str:
    """The values as bars between their least and greatest."""
    if not values:
        return ""
    low, high = min(values), max(values)
    step = (high - low) / (len(BARS) - 1) or 1.0
    return "".join(BARS[round((value - low) / step)] for value in values)


def known(error: BaseException) -> bool:
    """Whether an error speaks for itself: one of ours, or an unreachable database or Redis."""
    from redis.exceptions import RedisError
    from sqlalchemy.exc import OperationalError

    ours = type(error).__module__.partition(".")[0] in OURS
    return ours or isinstance(error, RedisError | OperationalError)


def explain(error: BaseException) -> str:
    """The error as one line, with what to look at where it does not say so itself."""
    from redis.exceptions import RedisError
    from sqlalchemy.exc import OperationalError

    if isinstance(error, OperationalError):
        return f"the database cannot be used ({' '.join(str(error.orig).split())}): check REDRAFT_DATABASE_URL"
    if isinstance(error, RedisError):
        return f"Redis cannot be reached ({error}): check REDRAFT_REDIS_URL"
    return " ".join(str(error).split())
