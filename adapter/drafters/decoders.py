"""A transformers decoder as part of a drafter: built around an input embedding that is not its own."""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from transformers import AutoConfig, AutoModel

FULL = "full_attention"


def decoder_around(config: Mapping[str, Any], embedding: Tensor) -> Any:
    """A decoder with random weights, made without an embedding of its own: `embedding` is put in, frozen."""
    shape = {**config, "vocab_size": 1, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    decoder = AutoModel.from_config(AutoConfig.for_model(**shape), dtype=embedding.dtype).to(embedding.device)
    slot = decoder.get_input_embeddings()
    slot.weight = nn.Parameter(embedding, requires_grad=False)
    slot.num_embeddings = len(embedding)
    decoder.config.vocab_size = len(embedding)
    return decoder.eval()


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
