"""AdamW's moments on their way from the run that made a version to the runs that start from it.

An optimiser that starts anew knows nothing of how large its gradients are, and takes its first steps accordingly.
The moments are kept as safetensors in the weights store, in bf16, so as many bytes as the weights have; a run starts
from what the file says, so it can still be repeated bit for bit.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from safetensors import SafetensorError
from safetensors.torch import load as parse
from safetensors.torch import save as serialise
from torch import Tensor, nn

from adapter.crew import placed, whole
from adapter.drafters.learnt import LearntDrafter
from adapter.versions import WeightsRefused

STEP = "step"
STATES = ("exp_avg", "exp_avg_sq")  # as AdamW names the first and the second moment


@dataclass(frozen=True)
class Moments:
    """The optimiser's state after `step` steps: tensors in bf16 by `<first or second>.<weight>`."""

    step: int
    tensors: dict[str, Tensor]


def taken(optimiser: torch.optim.AdamW, drafter: LearntDrafter) -> Moments:
    """What the optimiser of `drafter`'s weights has come to; a copy."""
    tensors, step = {}, 0
    for name, weight in _trained(drafter):
        state = optimiser.state[weight]
        step = int(state["step"])
        for kind in STATES:
            tensors[f"{kind}.{name}"] = whole(state[kind].detach()).to("cpu", torch.bfloat16, copy=True).contiguous()
    return Moments(step, tensors)


def put(moments: Moments, optimiser: torch.optim.AdamW, drafter: LearntDrafter) -> None:
    """Let the optimiser, which has taken no step yet, go on from `moments`."""
    for name, weight in _trained(drafter):
        state: dict[str, Tensor] = {kind: placed(moments.tensors[f"{kind}.{name}"], weight) for kind in STATES}
        optimiser.state[weight] = {"step": torch.tensor(float(moments.step)), **state}


def to_bytes(moments: Moments) -> bytes:
    return serialise({**moments.tensors, STEP: torch.tensor([moments.step])})


def from_bytes(data: bytes, drafter: LearntDrafter) -> Moments:
    """Raises `WeightsRefused` where they are not those of `drafter`'s weights."""
    try:
        tensors = parse(data)
        step = int(tensors.pop(STEP))
    except (SafetensorError, KeyError, ValueError) as error:
        raise WeightsRefused(f"not a file of moments: {error}") from error
    shapes = {f"{kind}.{name}": weight.shape for name, weight in _trained(drafter) for kind in STATES}
    if {name: tensor.shape for name, tensor in tensors.items()} != shapes:
        raise WeightsRefused("the moments are of other weights than the parent's")
    if not all(bool(torch.isfinite(tensor).all()) for tensor in tensors.values()):
        raise WeightsRefused("the moments are not finite")
    return Moments(step, tensors)


def _trained(drafter: LearntDrafter) -> Iterator[tuple[str, nn.Parameter]]:
    """The weights that learning changes, by name."""
    return ((name, weight) for name, weight in drafter.named_parameters() if weight.requires_grad)
