"""`redraft pin`: keeps a version's weights whatever their age."""

from typing import Annotated

import typer

from cli.opened import DrafterOption, open_drafter
from cli.output import say
from cli.settings import actor


def pin(
    number: Annotated[int, typer.Argument(metavar="N", help="number of the version")],
    off: Annotated[bool, typer.Option("--off", help="treat it like any other again")] = False,
    drafter: DrafterOption = "",
) -> None:
    """Keep a version's weights, however many newer ones there are."""
    from storage import marks

    opened = open_drafter(drafter)
    marks.pin(opened.database, opened.drafter.name, number, not off, actor())
    say(f"version {number} of {opened.drafter.name} is " + ("no longer pinned" if off else "pinned: its weights stay"))
