"""`redraft export N`: a version of a `causal_lm` drafter as files that other engines load.

`hf` is a folder for vLLM's `draft_model`, SGLang and transformers, `gguf` a file for llama.cpp. Nothing is served or
promoted by it: hosts export what they serve by themselves.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from cli.opened import DrafterOption, Opened, open_drafter
from cli.output import CommandError, say, size
from cli.settings import settings

if TYPE_CHECKING:
    import torch

    from adapter.fingerprints import TargetFiles
    from storage.registry import Version

Format = Literal["hf", "gguf"]
Dtype = Literal["", "bf16", "fp16", "fp32"]


def export(
    number: Annotated[int, typer.Argument(metavar="N", help="number of the version")],
    to: Annotated[Path, typer.Option("--to", help="folder to write into; it is made where it is missing")],
    form: Annotated[
        Format, typer.Option("--format", help="hf: for vLLM, SGLang and transformers; gguf: for llama.cpp")
    ] = "hf",
    dtype: Annotated[
        Dtype, typer.Option(help="what the numbers are held in; default: hf as the target's files, gguf fp16")
    ] = "",
    like: Annotated[
        Path | None, typer.Option(help="gguf: the file that llama.cpp serves as the target; its tokenizer is copied")
    ] = None,
    with_target: Annotated[
        bool, typer.Option("--with-target", help="gguf: write the target too, where it exists for transformers only")
    ] = False,
    drafter: DrafterOption = "",
) -> None:
    """Write a version as a Hugging Face checkpoint or a GGUF file."""
    if form == "hf" and (like is not None or with_target):
        raise CommandError("--like and --with-target are for --format gguf")
    opened = open_drafter(drafter)
    if opened.drafter.kind != "causal_lm":
        raise CommandError(
            f"drafter {opened.drafter.name} is of kind {opened.drafter.kind}, which only redraft's own engine serves: "
            f"causal_lm alone can be exported"
        )
    version = opened.registry.version(opened.drafter.name, number)
    for path in _written(opened, version, to, form, dtype, like, with_target):
        taken = sum(file.stat().st_size for file in path.rglob("*")) if path.is_dir() else path.stat().st_size
        say(f"{path} ({size(taken)})")


def _written(
    opened: Opened, version: "Version", to: Path, form: Format, dtype: Dtype, like: Path | None, with_target: bool
) -> list[Path]:
    """Everything that was asked for, in the folder `to`."""
    from adapter.export import gguf, hf
    from adapter.target import TargetConfig, fetch, load_embedding
    from adapter.versions import Versions
    from storage.weights import WeightsStore

    files = fetch(settings(TargetConfig))
    opened.registry.choose(opened.drafter.name, files.fingerprint)  # raises where it was made for another target
    versions = Versions(WeightsStore(opened.config.weights_folder), files, load_embedding(files))
    loaded, name = versions.load(version, opened.drafter), f"{opened.drafter.name}-{version.number}"
    if form == "hf":
        hf.write(loaded, files, to / name, _dtype(dtype) if dtype else None)
        return [to / name]
    held = _dtype(dtype or "fp16")
    gguf.write(loaded, files, to / f"{name}.gguf", held, like)
    return [to / f"{name}.gguf", *([_target(files, to, held)] if with_target else [])]


def _target(files: "TargetFiles", to: Path, dtype: "torch.dtype") -> Path:
    from adapter.export import gguf

    path = to / "target.gguf"
    gguf.write_target(files, path, dtype)
    return path


def _dtype(name: Dtype) -> "torch.dtype":
    import torch

    return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[name]
