"""The kinds of drafter that have weights: how each is built again from what is stored, and how version 1 is made."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from adapter.drafters.causal_lm import CausalLM, CausalLMConfig
from adapter.drafters.eagle import Eagle
from adapter.drafters.layer import LayerConfig
from adapter.drafters.learnt import DrafterRefused, LearntDrafter
from adapter.drafters.medusa import Medusa, MedusaConfig
from adapter.drafters.mtp import Mtp
from adapter.drafters.ngram import Ngram
from adapter.drafters.shared import Shared
from adapter.drafters.streaming import PASSES, Streaming, StreamingConfig
from adapter.taps import Taps
from adapter.target import EMBEDDINGS

FIRST = 2  # of the target's layers in a causal_lm
LAST = 1  # and that streams go through: in one they learned as much as in two, and cost less


@dataclass(frozen=True)
class Sizes:
    """How large version 1 is to be; a kind looks at what concerns it."""

    layers: int | None = None  # first ones of the target, or last ones that streams go through; None: FIRST or LAST
    depths: int = 4  # Medusa's heads, how deep a layer is trained, or streams
    rank: int = 16  # of the streams' adapters
    passes: int = PASSES  # in which streams go through


Config = Mapping[str, Any]
Rebuild = Callable[[Config, Shared, Mapping[str, Tensor]], LearntDrafter]
First = Callable[[Any, Shared, Tensor, Sizes], LearntDrafter]


@dataclass(frozen=True)
class Kind:
    """One kind."""

    rebuilt: Rebuild  # with random weights, from its stored configuration and the shapes of the version's tensors
    first: First  # version 1 out of a transformers causal LM, for the draft vocabulary [V_d]


def _causal_lm(config: Config, shared: Shared, tensors: Mapping[str, Tensor]) -> CausalLM:
    """Around the target's embedding, or room for a checkpoint's own in the same dtype and place."""
    stored = CausalLMConfig.from_dict(config)
    if stored.shares_embedding:
        return CausalLM(stored, shared.embedding)
    own = [tensor for name, tensor in tensors.items() if name.endswith(EMBEDDINGS)]
    if not own:
        raise DrafterRefused("missing tensors: the input embedding of a checkpoint of its own")
    return CausalLM(stored, own[0].to(dtype=shared.embedding.dtype, device=shared.embedding.device, copy=True))


def _layers(sizes: Sizes, usual: int) -> int:
    return usual if sizes.layers is None else sizes.layers


KINDS = {
    "causal_lm": Kind(
        _causal_lm, lambda model, shared, tokens, sizes: CausalLM.from_target(model, _layers(sizes, FIRST), tokens)
    ),
    "medusa": Kind(
        lambda config, shared, tensors: Medusa(MedusaConfig.from_dict(config), shared),
        lambda model, shared, tokens, sizes: Medusa.from_target(model, shared, tokens, sizes.depths),
    ),
    "mtp": Kind(
        lambda config, shared, tensors: Mtp(LayerConfig.from_dict(config), shared),
        lambda model, shared, tokens, sizes: Mtp.from_target(model, shared, tokens, sizes.depths),
    ),
    "eagle": Kind(
        lambda config, shared, tensors: Eagle(LayerConfig.from_dict(config), shared),
        lambda model, shared, tokens, sizes: Eagle.from_target(model, shared, tokens, sizes.depths),
    ),
    "streaming": Kind(
        lambda config, shared, tensors: Streaming(StreamingConfig.from_dict(config), shared),
        lambda model, shared, tokens, sizes: Streaming.from_target(
            model, shared, tokens, sizes.depths, _layers(sizes, LAST), sizes.rank, sizes.passes
        ),
    ),
}


def kind_of(name: str) -> Kind:
    """Raises `DrafterRefused`."""
    if name == Ngram.kind:
        raise DrafterRefused(
            "an ngram drafter has no weights, so it has no versions to make, train, promote or roll back: serve with "
            "REDRAFT_FALLBACK=ngram and it proposes where no drafter is live, with REDRAFT_NGRAM_FIRST=true beside a "
            "learnt one; `redraft bench drafters` holds it against the others"
        )
    if name not in KINDS:
        raise DrafterRefused(f"there is no kind {name!r}: use {', '.join(KINDS)}")
    return KINDS[name]


def first_version(kind: str, model: Any, shared: Shared, draft_to_target: Tensor, sizes: Sizes) -> LearntDrafter:
    """Version 1 for the target `model`; raises `DrafterRefused` where that target cannot be drafted for like this."""
    made = kind_of(kind).first(model, shared, draft_to_target, sizes)
    try:
        Taps(model, made.taps)
    except (ValueError, AttributeError) as error:
        raise DrafterRefused(
            f"a {kind} drafter reads the target's hidden states, which cannot be read of this target ({error}): "
            f"use causal_lm"
        ) from error
    return made
