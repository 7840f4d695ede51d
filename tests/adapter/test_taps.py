"""Taps: hidden states of a pass are those that transformers itself tells, and nothing stays behind."""

from threading import Thread

import pytest
import torch
from torch import Tensor

from adapter.taps import FINAL, Taps
from adapter.target import Target

TOKENS = torch.tensor([[3, 14, 15, 92, 65], [35, 89, 79, 32, 38]])


def read(target: Target, *taps: int) -> Tensor:
    found = Taps(target.model, taps)
    with torch.no_grad(), found.reading():
        target.model(input_ids=TOKENS)
    return found.hidden()


def own(target: Target) -> tuple[Tensor, ...]:
    """transformers' own account: the first layer's input, each layer's output, and the last one's normed."""
    with torch.no_grad():
        states: tuple[Tensor, ...] = target.model(input_ids=TOKENS, output_hidden_states=True).hidden_states
    return states


def hooks(target: Target) -> int:
    """transformers has some of its own."""
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in target.model.modules())


@pytest.mark.parametrize(("tap", "state"), [(0, 0), (1, 1), (2, 2), (FINAL, 3)])
def test_a_tap_reads_what_transformers_says_is_there(target: Target, tap: int, state: int) -> None:
    assert torch.equal(read(target, tap), own(target)[state])


def test_the_last_layer_is_read_before_the_final_norm(target: Target) -> None:
    last = read(target, 3)
    assert torch.equal(target.model.get_decoder().norm(last), read(target, FINAL))
    assert not torch.equal(last, read(target, FINAL))


def test_the_head_makes_the_logits_of_the_final_tap(target: Target) -> None:
    with torch.no_grad():
        logits = target.model(input_ids=TOKENS).logits
        assert torch.equal(target.model.get_output_embeddings()(read(target, FINAL)), logits)


def test_several_taps_stand_side_by_side_in_their_order(target: Target) -> None:
    assert torch.equal(read(target, 2, 1), torch.cat([read(target, 2), read(target, 1)], dim=-1))


def test_only_passes_in_the_block_are_read_and_no_hook_stays(target: Target) -> None:
    taps, before = Taps(target.model, (1, 0, FINAL)), hooks(target)
    with torch.no_grad(), taps.reading():
        target.model(input_ids=TOKENS[:1])
    target.model(input_ids=TOKENS)
    assert len(taps.hidden()) == 1
    assert hooks(target) == before


def test_what_another_thread_runs_meanwhile_is_not_read(target: Target) -> None:
    taps = Taps(target.model, (0, 1, FINAL))
    with torch.no_grad(), taps.reading():
        target.model(input_ids=TOKENS)
        other = Thread(target=lambda: target.model(input_ids=TOKENS[:1, :2]))
        other.start()
        other.join()
    assert torch.equal(taps.hidden(), read(target, 0, 1, FINAL))


def test_a_layer_that_is_not_there_is_refused(target: Target) -> None:
    with pytest.raises(ValueError, match="use -1 to 3"):
        Taps(target.model, (1, 4))
