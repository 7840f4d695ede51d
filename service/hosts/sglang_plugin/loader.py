"""SGLang's `--custom-weight-loader`: loads the drafter that the pointer names into the model that it is given.

It runs in the scheduler's own thread, and whatever it raised would end the scheduler. So it raises nothing: the file is
checked before anything of the model is touched, and what came of it is answered beside the pointer.
"""

import importlib
import os
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import structlog
import torch
from safetensors.torch import load as parse
from torch import Tensor

from service.hosts.sglang_plugin.pointer import Answer, PointerConfig, Wanted, read_wanted, write_answer
from storage.config import read

LOADER = "service.hosts.sglang_plugin.loader.load_from_pointer"
NOBODY = Wanted("", "", 0, "", "")

log = structlog.get_logger()

_loaded = NOBODY  # what this process' draft model holds; nobody's: what SGLang was started with


class NotLoadable(ValueError):
    """Weights that must not be loaded; the message says why."""


def loaded() -> Wanted:
    """What the drafter in this process is."""
    return _loaded


def load_from_pointer(model: Any, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """As SGLang calls it, with the draft model, and no tensors."""
    global _loaded
    pointer = read(PointerConfig, os.environ).sglang_pointer.expanduser()
    push, touched = "", False
    try:
        wanted = read_wanted(pointer)
        push = wanted.push
        tensors = checked(Path(wanted.path) / "model.safetensors", wanted.sha256)
        touched = True
        model.load_weights(iter(tensors.items()))
        _loaded = wanted
        answer = Answer(push, True, False, "")
    except Exception as error:  # not one of them may reach the scheduler
        log.warning("sglang.not_loaded", error=type(error).__name__, reason=str(error))
        answer = Answer(push, False, not touched, f"{type(error).__name__}: {error}")
    try:
        write_answer(pointer, _rank(), answer)
    except OSError as error:
        log.warning("sglang.not_answered", error=type(error).__name__)


def checked(path: Path, digest: str) -> dict[str, Tensor]:
    """The file's tensors. Raises `NotLoadable` for another file than was pushed, and for numbers that are none."""
    data = path.read_bytes()
    if sha256(data).hexdigest() != digest:
        raise NotLoadable(f"{path} is not the file that was pushed")
    tensors: dict[str, Tensor] = parse(data)
    broken = [name for name, tensor in tensors.items() if not bool(torch.isfinite(tensor).all())]
    if broken:
        raise NotLoadable(f"{broken[0]} holds numbers that are not finite")
    return tensors


def _rank() -> int:
    """This process' place among those that share the model."""
    context = importlib.import_module("sglang.srt.runtime_context")
    return int(context.get_parallel().tp_rank)
