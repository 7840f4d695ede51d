"""`redraft reproduce`: trains a version again from its lineage, and says whether the same bits come out."""

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from cli import logs
from cli.opened import DrafterOption, JsonOption, Opened, open_drafter
from cli.output import say, show_json
from cli.settings import actor, settings

if TYPE_CHECKING:
    from worker.reproduce import Reproduction


def reproduce(
    number: Annotated[int, typer.Argument(metavar="N", help="number of the version to train again")],
    drafter: DrafterOption = "",
    restore: Annotated[
        bool,
        typer.Option("--restore", help="store weights that were deleted for their age again, if they are the same"),
    ] = False,
    json: JsonOption = False,
) -> None:
    """Train a version again from its parent and windows, and compare. Exit code 1 unless the weights are identical."""
    logs.configure(replace(settings(logs.LogConfig), log_level="WARNING"))
    opened = open_drafter(drafter)
    found = _train_again(opened, number, actor() if restore else "")
    if json:
        show_json(found)
    else:
        _say(found)
    if found.outcome != "identical":
        raise typer.Exit(1)


def _train_again(opened: Opened, number: int, restore: str) -> "Reproduction":
    """In this process, with the trainer's niceness: serving goes first."""
    from adapter.target import TargetConfig, fetch, load_embedding
    from adapter.versions import Versions
    from storage.weights import WeightsStore
    from storage.windows import Windows
    from worker.config import TrainerConfig
    from worker.reproduce import Lineage, reproduce
    from worker.rescoring import loading

    trainer = settings(TrainerConfig)
    os.nice(trainer.trainer_nice)
    target = settings(TargetConfig)
    files = fetch(target)
    drafter = opened.registry.choose(opened.drafter.name, files.fingerprint)
    blobs = WeightsStore(opened.config.weights_folder)
    versions = Versions(blobs, files, load_embedding(files).to(trainer.trainer_device))
    lineage = Lineage(opened.registry, Windows(opened.database, blobs), versions, loading(target, files))
    return reproduce(lineage, drafter, number, restore)


def _say(found: "Reproduction") -> None:
    name = f"version {found.version} of {found.drafter}"
    if found.outcome == "identical":
        say(f"{name}: identical, sha256 {found.sha256}" + (", and stored again" if found.restored else ""))
    elif found.outcome == "different":
        say(f"{name}: different, sha256 {found.rebuilt_sha256} instead of {found.sha256}")
    else:
        say(f"{name} cannot be reproduced")
    for difference in found.differences:
        say(f"  {difference}")
