"""A transformers decoder as part of a drafter: built around an input embedding that is not its own."""

from collections.abc import Iterator, Mapping
from functools import cache
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel

FULL = "full_attention"
PLAIN = {"LlamaModel", "MistralModel", "Qwen2Model", "Qwen3Model"}  # that do no more than run their layers


def decoder_around(config: Mapping[str, Any], embedding: Tensor) -> Any:
    """A decoder with random weights, made without an embedding of its own: `embedding` is put in, frozen."""
    shape = {**config, "vocab_size": 1, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    decoder = AutoModel.from_config(AutoConfig.for_model(**shape), dtype=embedding.dtype).to(embedding.device)
    slot = decoder.get_input_embeddings()
    slot.weight = nn.Parameter(embedding, requires_grad=False)
    slot.num_embeddings = len(embedding)
    decoder.config.vocab_size = len(embedding)
    return decoder.eval()


@cache
def _arguments(kind: type[Any]) -> frozenset[str]:
    return frozenset(signature(kind.forward).parameters)


def cache_argument(decoder: Any) -> str:
    """What the decoder's forward calls its memory: transformers renamed it, and some engines pin an older one."""
    return "cache" if "cache" in _arguments(decoder.__class__) else "past_key_values"


def is_plain(decoder: Any) -> bool:
    """Whether all that its forward does is known: embed, run the layers, norm."""
    return type(decoder).__name__ in PLAIN


def run(decoder: Any, embedded: Tensor, positions: Tensor, mask: Tensor | dict[str, Tensor], memory: Any) -> Tensor:
    """Final hidden states [B, n, H] of embedded tokens under a mask [B, 1, n, m] that is added to attention's scores.

    Of one or two layers, what transformers does around them (masks anew, outputs recorded) takes longer than they do,
    so without gradients they are run one after the other, as those decoders do that are known to do just that.
    """
    named = {cache_argument(decoder): memory}
    if not is_plain(decoder) or torch.is_grad_enabled():
        out = decoder(inputs_embeds=embedded, position_ids=positions, attention_mask=mask, use_cache=True, **named)
        ended: Tensor = out.last_hidden_state
        return ended
    turn, states = decoder.rotary_emb(embedded, position_ids=positions), embedded
    for at, layer in enumerate(decoder.layers):
        own = mask if isinstance(mask, Tensor) else mask[decoder.config.layer_types[at]]
        states = layer(states, attention_mask=own, position_embeddings=turn, position_ids=positions, **named)
    normed: Tensor = decoder.norm(states)
    return normed


def embedding_name(decoder: Any) -> str:
    """What the decoder's state calls its input embedding."""
    weight = decoder.get_input_embeddings().weight
    names: Iterator[str] = (name for name, parameter in decoder.named_parameters() if parameter is weight)
    return next(names)


def first_layers(config: Any, layers: int) -> dict[str, Any]:
    """A decoder's configuration cut to its first layers, where it lists layers one by one too."""
    data: dict[str, Any] = config.to_dict()
    data["num_hidden_layers"] = layers
    if data.get("layer_types"):
        data["layer_types"] = data["layer_types"][:layers]
    return data


def full_layers(config: Any, layers: int) -> dict[str, Any]:
    """A decoder's configuration cut to some layers, each of which attends to all that stands before it."""
    data: dict[str, Any] = config.to_dict()
    data["num_hidden_layers"] = layers
    if data.get("layer_types"):
        data["layer_types"] = [FULL] * layers
    elif data.get("sliding_window"):
        data["sliding_window"] = None
    return data
