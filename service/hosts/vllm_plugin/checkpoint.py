"""A drafter's checkpoint file, as the engine that is to serve it sees it: whole, fitting, and then really served.

A file that was found to fit is kept in memory until it is served or given up, so that generation does not stand still
while it is read, and what is loaded is what was checked.
"""

from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from service.hosts.vllm_plugin.reading import contents, digest, fingerprint, sample, shapes

TIED = {"lm_head.weight": "model.embed_tokens.weight"}  # what a head without a tensor of its own is

Tensors = dict[str, Tensor]

_kept: dict[str, Tensors] = {}  # by sha256, at most one


class CheckpointRefused(ValueError):
    """A file that must not be loaded."""


def read(path: str, expected: str) -> Tensors:
    """The tensors of a safetensors file whose sha256 is `expected`; the bytes that are checked are those used."""
    if expected in _kept:
        return _kept[expected]
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise CheckpointRefused(f"{path} cannot be read ({error.strerror})") from error
    found = sha256(data).hexdigest()
    if found != expected:
        raise CheckpointRefused(f"{path} has sha256 {found}, not {expected}: it was changed or is damaged")
    try:
        return safetensors.torch.load(data)
    except safetensors.SafetensorError as error:
        raise CheckpointRefused(f"{path} is no safetensors file ({error})") from error


def checked(path: str, expected: str, model: nn.Module, target: nn.Module) -> Tensors:
    """`read`, and refused where it has `problems`; a kept file had none."""
    tensors = read(path, expected)
    found = [] if expected in _kept else problems(tensors, model, target)
    if found:
        raise CheckpointRefused(f"{path} does not fit the draft: {found[0]}")
    return tensors


def keep(expected: str, tensors: Tensors) -> None:
    """Have `read` return these, until `drop`."""
    drop()
    _kept[expected] = tensors


def drop() -> None:
    _kept.clear()


def problems(tensors: Tensors, model: nn.Module, target: nn.Module) -> list[str]:
    """Why `tensors` cannot be all the weights of the draft `model`; empty: they can.

    What the draft shares with the target (EAGLE's embedding and head) must not be in the file: loading it would
    change the target.
    """
    wanted, own = shapes(model), shapes(model, target.modules())
    placed = _placed(tensors, wanted)
    found = [f"{name}: the draft has no such tensor" for name in tensors if _place(name, wanted) is None]
    found += [f"{name}: is shared with the target" for name in placed if name not in own]
    found += [f"{name}: is missing" for name in own if name not in placed and _tied(name, model) not in placed]
    for name, tensor in placed.items():
        if name in own and tuple(tensor.shape) != own[name]:
            found.append(f"{name}: has shape {list(tensor.shape)}, the draft {list(own[name])}")
        elif tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            found.append(f"{name}: has values that are not finite")
        if _tied(name, model):
            found.append(f"{name}: the draft has none of its own, it is tied to {TIED[name]}")
    return found


def differing(tensors: Tensors, model: nn.Module, shared: Iterable[nn.Module], count: int) -> tuple[list[str], str]:
    """The tensors that `model` does not hold as the file does, bit for bit; and the fingerprint of what it holds."""
    digests, wrong = {}, []
    placed = _placed(tensors, shapes(model))
    for name, values in contents(model, shared, count):
        digests[name] = digest(values)
        expected = placed.get(name, placed.get(_tied(name, model)))
        if expected is None or digest(sample(expected, values.dtype, count)) != digests[name]:
            wrong.append(name)
    return wrong, fingerprint(digests)


def _placed(tensors: Tensors, wanted: dict[str, Any]) -> Tensors:
    return {place: tensor for name, tensor in tensors.items() if (place := _place(name, wanted)) is not None}


def _place(name: str, wanted: dict[str, Any]) -> str | None:
    """A tensor's name in the model; EAGLE checkpoints leave out the `model.` in front."""
    return next((place for place in (name, f"model.{name}") if place in wanted), None)


def _tied(name: str, model: Any) -> str:
    """The name of the tensor that `name` is tied to, or nothing."""
    tied = getattr(getattr(model, "config", None), "tie_word_embeddings", False)
    return TIED.get(name, "") if tied else ""
