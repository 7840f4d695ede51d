"""The target's last layers as a part of a drafter: never copied, frozen, with low-rank adapters beside them."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache

from adapter.drafters.decoders import embedding_name
from adapter.drafters.learnt import DrafterRefused
from adapter.drafters.low_rank import Adapted
from adapter.drafters.shared import Shared
from adapter.masks import additive
from adapter.taps import FINAL, Taps

OTHERS = "use causal_lm, medusa, mtp or eagle"
TRIED = 8  # tokens on which the shared layers are compared with the target's own
NEAR = 0.05  # relative: the target may be held in bf16


def share(decoder: Any, shared: Shared, first: int) -> None:
    """Put the target's layers from `first` on, and its final norm, in place of the decoder's.

    They are read from its files, once for all drafters. Raises `DrafterRefused` where they are not there.
    """
    embedding = embedding_name(decoder)
    names = {name: name for name, _ in decoder.named_parameters() if name != embedding}
    for at in range(decoder.config.num_hidden_layers):
        ours, theirs = f"layers.{at}.", f"layers.{first + at}."
        names |= {name: theirs + name.removeprefix(ours) for name in names if name.startswith(ours)}
    tensors = shared.decoder_tensors(names.values())
    for name, theirs in names.items():
        if theirs not in tensors or tensors[theirs].shape != decoder.get_parameter(name).shape:
            raise DrafterRefused(f"the target's files do not hold the layers that streams go through: {OTHERS}")
        module, _, weight = name.rpartition(".")
        setattr(decoder.get_submodule(module), weight, nn.Parameter(tensors[theirs], requires_grad=False))


def join(decoder: Any, model: Any, first: int) -> None:
    """Let adapted layers go through the target's own modules, as they lie packed in its memory, where they fit."""
    theirs = model.get_decoder().layers
    for at, layer in enumerate(decoder.layers):
        own = dict(theirs[first + at].named_modules())
        for name, child in layer.named_modules():
            if isinstance(child, Adapted) and _alike(child.base, own.get(name)):
                child.base = own[name]


def _alike(ours: nn.Module, theirs: nn.Module | None) -> bool:
    """Whether one linear layer may stand for the other."""
    if theirs is None:
        return False
    sizes = [(one.in_features, one.out_features) for one in (ours, theirs) if hasattr(one, "in_features")]
    one, other = (next(iter(module.state_dict().values()), None) for module in (ours, theirs))
    fits = one is not None and other is not None and (one.dtype, one.device) == (other.dtype, other.device)
    return len(sizes) == 2 and sizes[0] == sizes[1] and fits


@torch.no_grad()
def run_alike(streams: Any, model: Any) -> bool:
    """Whether a drafter's layers, not yet adapted, make of their inputs what the target makes, with the same memory."""
    tokens = streams.draft_to_target[:TRIED][None]
    taps = Taps(model, (*streams.taps, FINAL))
    with taps.reading():
        model.get_decoder()(input_ids=tokens.to(model.device))
    *read, final = taps.hidden().to(streams.shared.embedding).chunk(len(streams.taps) + 1, dim=-1)
    positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
    run: Any = DynamicCache()
    remembered: Any = DynamicCache()
    causal = mask_of_depth(positions, 0, final.dtype)[..., : tokens.shape[1]]
    found = streams.read(read[0], positions, causal, run)
    streams.remember(torch.cat(read, dim=-1), positions, remembered)
    pairs = [(found, final)]
    for one, other in zip(run.layers, remembered.layers, strict=True):
        pairs += [(other.keys, one.keys), (other.values, one.values)]
    return all(float((a - b).norm()) <= NEAR * float(b.norm()) for a, b in pairs)


def mask_of_depth(positions: Tensor, depth: int, dtype: torch.dtype) -> Tensor:
    """Additive [B or 1, 1, n, (depth + 2) n] for stream depth + 1 of each token: 0 where it may attend.

    The main stream comes first, then the streams in their order. It sees the main one of its text up to its token, and
    of the streams those of its token.
    """
    n = positions.shape[1]
    text = (positions == 0).cumsum(-1)
    past = torch.ones(n, n, dtype=torch.bool, device=positions.device).tril()
    main = past & (text[:, :, None] == text[:, None, :])
    own = torch.eye(n, dtype=torch.bool, device=positions.device).expand_as(main)
    return additive(torch.cat([main, *[own] * (depth + 1)], dim=-1), dtype)


def mask_of_pass(main: Tensor, streams: int) -> Tensor:
    """Additive [B, 1, m s, end + m s] for the s streams of each of m tokens, by the rows [B, 1, m, end] of their mask.

    A stream sees what the main one of its token sees, and of the streams that token's up to itself.
    """
    tokens = main.shape[2]
    token = torch.arange(tokens * streams, device=main.device)
    own = (token[:, None] // streams == token // streams) & (token[:, None] >= token)
    beside = additive(own[None], main.dtype).expand(len(main), -1, -1, -1)
    return torch.cat([main.repeat_interleave(streams, dim=2), beside], dim=-1)
