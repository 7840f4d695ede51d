"""The optimiser's moments: on the way to a file and back, and what is refused."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import save

from adapter import moments
from adapter.drafters.causal_lm import CausalLM
from adapter.target import Target
from adapter.versions import WeightsRefused


@pytest.fixture
def drafter(target: Target) -> CausalLM:
    return CausalLM.from_target(target.model, 1, torch.arange(0, target.vocab_size, 2))


def stepped(drafter: CausalLM, steps: int) -> torch.optim.AdamW:
    """An optimiser that has taken some steps on made-up gradients."""
    optimiser = torch.optim.AdamW(drafter.trainable(), lr=1e-3)
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        for weight in drafter.trainable():
            weight.grad = torch.randn(weight.shape, generator=generator)
        optimiser.step()
    return optimiser


def test_moments_come_back_from_their_file_as_they_were(drafter: CausalLM) -> None:
    taken = moments.taken(stepped(drafter, 3), drafter)
    back = moments.from_bytes(moments.to_bytes(taken), drafter)
    assert back.step == 3
    assert back.tensors.keys() == taken.tensors.keys()
    assert all(torch.equal(tensor, back.tensors[name]) for name, tensor in taken.tensors.items())


def test_the_same_moments_are_the_same_file(drafter: CausalLM) -> None:
    taken = moments.taken(stepped(drafter, 2), drafter)
    turned = replace(taken, tensors=dict(reversed(taken.tensors.items())))
    assert moments.to_bytes(taken) == moments.to_bytes(turned)


def test_an_optimiser_goes_on_with_them(drafter: CausalLM) -> None:
    """bf16 keeps 8 bits of each moment, so the step after is the same to a percent of it."""
    optimiser = stepped(drafter, 5)
    other = torch.optim.AdamW(drafter.trainable(), lr=1e-3)
    moments.put(moments.taken(optimiser, drafter), other, drafter)
    before = [weight.detach().clone() for weight in drafter.trainable()]
    moved = []
    for each in (optimiser, other):
        with torch.no_grad():
            for weight, was in zip(drafter.trainable(), before, strict=True):
                weight.copy_(was)
                weight.grad = torch.full_like(weight, 0.1)
        each.step()
        moved.append([w.detach() - was for w, was in zip(drafter.trainable(), before, strict=True)])
    for ours, theirs in zip(*moved, strict=True):
        assert float((ours - theirs).abs().max()) < 0.02 * float(ours.abs().max())


def test_they_take_half_the_bytes_of_what_they_were(drafter: CausalLM) -> None:
    taken = moments.taken(stepped(drafter, 1), drafter)
    weights = sum(weight.numel() for weight in drafter.trainable())
    assert sum(t.numel() * t.element_size() for t in taken.tensors.values()) == 4 * weights


def test_moments_of_other_weights_are_refused(drafter: CausalLM, target: Target) -> None:
    data = moments.to_bytes(moments.taken(stepped(drafter, 1), drafter))
    other = CausalLM.from_target(target.model, 1, torch.arange(0, target.vocab_size, 3))
    with pytest.raises(WeightsRefused, match="of other weights"):
        moments.from_bytes(data, other)


def test_moments_that_are_not_finite_are_refused(drafter: CausalLM) -> None:
    taken = moments.taken(stepped(drafter, 1), drafter)
    next(iter(taken.tensors.values())).flatten()[0] = torch.inf
    with pytest.raises(WeightsRefused, match="not finite"):
        moments.from_bytes(moments.to_bytes(taken), drafter)


@pytest.mark.parametrize("data", [b"", b"nothing of the kind", save({"head.weight": torch.zeros(2)})])
def test_other_files_are_refused(drafter: CausalLM, data: bytes) -> None:
    with pytest.raises(WeightsRefused, match="not a file of moments"):
        moments.from_bytes(data, drafter)
