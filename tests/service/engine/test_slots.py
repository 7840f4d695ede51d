"""Key-value slots against full forwards without any memory."""

import pytest
import torch

from adapter.target import Target
from service.engine.slots import Slots


def forward(target: Target, slots: Slots, tokens: list[list[int]], starts: list[int], first: int = 0) -> torch.Tensor:
    place = slots.begin(starts, len(tokens[0]), first)
    with torch.inference_mode():
        logits: torch.Tensor = target.model(
            input_ids=torch.tensor(tokens),
            position_ids=place.positions,
            attention_mask=place.mask,
            cache=slots,
            use_cache=True,
        ).logits
    return logits


def full(target: Target, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = target.model(input_ids=torch.tensor([tokens])).logits[0]
    return logits


@pytest.fixture
def slots(target: Target) -> Slots:
    return Slots(target.model.get_decoder(), 4, 400)


def test_rows_of_different_lengths_in_one_forward_equal_their_own_full_forwards(target: Target, slots: Slots) -> None:
    sequences = [list(range(10, 10 + n)) for n in (5, 17, 2)]
    for slot, sequence in enumerate(sequences):
        forward(target, slots, [sequence], [0], first=slot)
    logits = forward(target, slots, [[40, 41]] * 3, [len(s) for s in sequences])
    for row, sequence in enumerate(sequences):
        assert torch.allclose(logits[row], full(target, [*sequence, 40, 41])[-2:], atol=1e-4)


def test_a_rejection_lowers_the_length_and_what_was_written_past_it_is_gone(target: Target, slots: Slots) -> None:
    forward(target, slots, [list(range(10, 20))], [0])
    logits = forward(target, slots, [[50, 51]], [6])
    assert torch.allclose(logits[0], full(target, [*range(10, 16), 50, 51])[-2:], atol=1e-4)


def test_a_slot_moves_with_all_that_it_holds(target: Target, slots: Slots) -> None:
    forward(target, slots, [list(range(10, 20))], [0], first=2)
    with torch.inference_mode():
        slots.move(2, 0)
    logits = forward(target, slots, [[50]], [10])
    assert torch.allclose(logits[0], full(target, [*range(10, 20), 50])[-1:], atol=1e-4)


def test_slots_grow_with_what_they_hold_and_not_before(target: Target, slots: Slots) -> None:
    forward(target, slots, [[5]], [0])
    before = slots.layers[0].keys.shape[2]
    forward(target, slots, [list(range(10, 20))], [0])
    sequence = [5 + i % 200 for i in range(300)]
    logits = forward(target, slots, [sequence], [0])
    assert before < 300 <= slots.layers[0].keys.shape[2] <= 400
    assert torch.allclose(logits[0, -1], full(target, sequence)[-1], atol=1e-4)


def test_the_capacity_is_never_passed(slots: Slots) -> None:
    with pytest.raises(ValueError, match="capacity of 400"):
        slots.begin([399], 2)
