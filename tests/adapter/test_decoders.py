"""A decoder's layers run one after the other are what its own forward is, for every family that is run so."""

from typing import Any

import pytest
import torch
from transformers import AutoModel, GPTNeoXConfig, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config
from transformers.cache_utils import DynamicCache

from adapter.drafters.decoders import PLAIN, cache_argument, is_plain, run
from adapter.masks import additive
from service.engine import attention
from service.engine.slots import Slots

SHAPE: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.3,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
CONFIGS = [
    LlamaConfig(**SHAPE),
    MistralConfig(**SHAPE, sliding_window=5),
    Qwen2Config(**SHAPE, use_sliding_window=True, sliding_window=5, max_window_layers=1),
    Qwen3Config(**SHAPE),
]


def decoder_of(config: Any) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        return AutoModel.from_config(config).eval()


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.model_type)
@torch.no_grad()
def test_the_layers_give_what_the_decoders_own_forward_gives(config: Any) -> None:
    """Over slots, under the masks that they give: further tokens after a text that is longer than a window."""
    decoder, embedded = decoder_of(config), torch.randn(2, 12, 32)
    attention.install(decoder)
    found = []
    for own in (False, True):
        slots = Slots(decoder, 2, 20)
        for start, end in ((0, 9), (9, 12)):
            place = slots.begin([start, start], end - start)
            part, named = embedded[:, start:end], {cache_argument(decoder): slots}
            if own:
                out = decoder(
                    inputs_embeds=part,
                    position_ids=place.positions,
                    attention_mask=place.mask,
                    use_cache=True,
                    **named,
                ).last_hidden_state
            else:
                out = run(decoder, part, place.positions, place.mask, slots)
        found.append(out)
    assert torch.equal(*found)


def test_every_family_that_is_run_so_is_held_against_its_own_forward() -> None:
    assert {type(decoder_of(config)).__name__ for config in CONFIGS} == PLAIN


def test_others_and_those_that_learn_are_run_as_they_are() -> None:
    other = decoder_of(GPTNeoXConfig(**{name: SHAPE[name] for name in SHAPE if name not in {"num_key_value_heads"}}))
    assert not is_plain(other)
    positions = torch.arange(3)[None]
    mask = additive(torch.ones(1, 3, 3, dtype=torch.bool).tril(), torch.float32)
    for decoder in (other, decoder_of(CONFIGS[0])):
        embedded = torch.randn(1, 3, 32, requires_grad=True)
        out = run(decoder, embedded, positions, mask, DynamicCache())
        out.sum().backward()
        assert embedded.grad is not None
