"""What the `redraft bench` commands are asked with: their common options, prompts by workload, lists of numbers."""

import os
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from cli import logs
from cli.init import read_prompts
from cli.output import CommandError
from cli.settings import warn_unknown
from service.engine.heap import settle

T = TypeVar("T", int, float)

FileOption = Annotated[Path | None, typer.Option("--json", help="file to write all figures to")]
TokensOption = Annotated[int, typer.Option(help="output tokens of a request at most", min=2)]


def numbers(option: str, text: str, kind: type[T], least: T) -> tuple[T, ...]:
    """The numbers of a comma-separated option, each once; raises `CommandError` naming what is no such number."""
    found = []
    for part in text.split(","):
        try:
            found.append(kind(part))
        except ValueError as error:
            raise CommandError(f"{option} {text!r}: {part.strip()!r} is no number; write for example 1,2,4") from error
        if not found[-1] >= least:
            raise CommandError(f"{option} {text!r}: {part.strip()} is below {least}")
    return tuple(dict.fromkeys(found))


def chosen_names(option: str, text: str, known: tuple[str, ...]) -> tuple[Any, ...]:
    """The names of a comma-separated option; all that are known for an empty one."""
    names = tuple(dict.fromkeys(part.strip() for part in text.split(","))) if text.strip() else known
    if strange := [name for name in names if name not in known]:
        raise CommandError(f"{option}: {strange[0]!r} is none of {', '.join(known)}")
    return names


def texts_of(files: list[Path]) -> dict[str, list[str]]:
    """The prompts of each workload, by the name of its file."""
    texts = {path.stem: read_prompts(path) for path in files}
    if len(texts) < len(files):
        raise CommandError("two --workload files have one name: rename one, as rows are told apart by it")
    return texts


def prepare() -> None:
    """A process that decodes as a server's does. Only what goes wrong is logged: the output is the table."""
    settle(os.environ)
    logs.configure(logs.LogConfig(log_level="WARNING"))
    warn_unknown()
