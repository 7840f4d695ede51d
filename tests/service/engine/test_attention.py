"""Attention with shared heads against transformers' own."""

import pytest
import torch

from adapter.target import Target
from service.engine import attention
from service.engine.slots import Slots


@pytest.mark.parametrize("width", [1, 4])
def test_it_equals_transformers_own_attention_over_rows_of_different_lengths(target: Target, width: int) -> None:
    tokens = torch.arange(20, 20 + 3 * 9).reshape(3, 9)
    found = []
    for name in (attention.STOCK, attention.NAME):
        target.model.set_attn_implementation(name)
        slots = Slots(target.model.get_decoder(), 3, 64)
        for starts, part in (([0, 0, 0], tokens), ([9, 4, 6], tokens[:, :width])):
            place = slots.begin(starts, part.shape[1])
            with torch.inference_mode():
                logits = target.model(
                    input_ids=part,
                    position_ids=place.positions,
                    attention_mask=place.mask,
                    cache=slots,
                    use_cache=True,
                ).logits
        found.append(logits)
    assert torch.allclose(*found, atol=1e-5)


def test_a_model_on_another_attention_is_left_alone(target: Target) -> None:
    target.model.set_attn_implementation("eager")
    attention.install(target.model)
    assert target.model.config._attn_implementation == "eager"
    target.model.set_attn_implementation(attention.STOCK)
    attention.install(target.model)
    assert target.model.config._attn_implementation == attention.NAME
