"""The `streaming` drafter: speculative streams beside the target's main one (Bhendawade et al., arXiv 2402.11131).

Streams j = 1 .. gamma begin at the main stream's state M[t] after layer N - Ns, as f(M[t]) + P[j], f the identity and
something of a low rank and P[j] a vector of the stream's own (eq. 3), and go through the target's last Ns layers, final
norm and head, which are frozen. In each layer stream j of token t attends to the main stream up to t and to the streams
1 to j of t (multi-stream attention, eq. 2). Low-rank adapters on these layers act on the streams alone: the main stream
is the target's, bit for bit. Stream j says token t + 1 + j, all of them at once, and stands at position t + j. They
learn the next n-gram together, stream j with weight 0.8^(j - 1).

Where it differs from the paper:
- There the streams of all proposed tokens go through the verifying pass. Here a pass of their own follows it, of the
  last verified token's gamma streams through Ns layers: one more launch a round, about Ns / N of a target step, for
  fewer tokens. The main stream is not run again. Its keys and values in these layers, to which streams attend, are
  projected again from the layers' inputs, which the target's pass leaves (the taps), and kept in slots of the drafter.
- What is kept of a row beside them is M[t], one hidden state; the streams are made of it when a proposal is due.
- The paper prunes its tree by an early exit from layer N - Ns of the verifying pass. No state of a proposed token is
  there before that pass, which here is the engine's and takes the tree as it is: there is no pruning. The tree is the
  Cartesian product of the streams' choices within the node budget, as with Medusa.

The shared layers are read from the target's files once for all versions, as the head is, and are part of none. On a CPU
each version that is served packs them for itself (adapter/packing).
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from adapter.drafters import low_rank
from adapter.drafters.conditioned import kept_states, last_states, propose_apart, shifted
from adapter.drafters.decoders import decoder_around, embedding_name, full_layers
from adapter.drafters.learnt import DrafterRefused, LearntDrafter
from adapter.drafters.protocol import DraftRow, FollowRow, KeyValues, Proposal, Shape
from adapter.drafters.shared import Shared
from adapter.masks import additive
from adapter.taps import FINAL, Taps

TRIED = 8  # tokens on which the shared layers are compared with the target's own
TINY = 1e-6  # padding has no size
NEAR = 0.05  # relative: the target may be held in bf16
OTHERS = "use causal_lm, medusa, mtp or eagle"


@dataclass(frozen=True)
class StreamingConfig:
    """What is needed to build the drafter again, beside its weights and what it shares with the target."""

    streams: int  # gamma
    rank: int  # of the adapters
    draft_vocab: int
    taps: tuple[int, ...]  # the inputs of the layers that streams go through: N - Ns to N - 1
    decoder: dict[str, Any]  # the transformers configuration of a decoder of these layers

    @property
    def shape(self) -> str:
        return (
            f"{self.streams} streams in the last {len(self.taps)} layers, rank {self.rank}, "
            f"{self.draft_vocab} draft tokens"
        )

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "taps": list(self.taps)}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> "StreamingConfig":
        return StreamingConfig(
            data["streams"], data["rank"], data["draft_vocab"], tuple(data["taps"]), dict(data["decoder"])
        )


class Streaming(LearntDrafter):
    """Stream vectors and adapters, around the target's last layers and the draft tokens' rows of its head."""

    kind = "streaming"
    depth_decay = 0.8
    config: StreamingConfig

    def __init__(self, config: StreamingConfig, shared: Shared) -> None:
        """Random adapters of the shape that `config` tells. Raises `DrafterRefused` where the layers are not there."""
        super().__init__(config.draft_vocab, shared.embedding)
        self.config, self.shared = config, shared
        self.taps, self.depths = config.taps, config.streams
        self.decoder = decoder_around(config.decoder, shared.embedding)
        _share(self.decoder, shared, config.taps[0])
        low_rank.adapt(self.decoder.layers, config.rank)
        hidden = shared.embedding.shape[1]
        self.begin = low_rank.LowRank(hidden, hidden, config.rank)
        self.begin.to(dtype=self.dtype, device=shared.embedding.device)
        self.identifiers = nn.Parameter(shared.embedding.new_zeros(config.streams, hidden))
        self.head = shared.head_of(self.draft_to_target)

    @staticmethod
    def from_target(
        model: Any, shared: Shared, draft_to_target: Tensor, streams: int, layers: int, rank: int
    ) -> "Streaming":
        """Streams that start as copies of the main one, each at its place. Raises `DrafterRefused`."""
        decoder = model.get_decoder()
        present = decoder.config.num_hidden_layers
        if streams < 1 or rank < 1:
            raise DrafterRefused(f"{streams} streams with adapters of rank {rank}: ask for 1 at least")
        if not 1 <= layers <= present:
            raise DrafterRefused(f"streams in {layers} layers of a target of {present}: ask for 1 to {present}")
        taps = tuple(range(present - layers, present))
        config = StreamingConfig(streams, rank, len(draft_to_target), taps, full_layers(decoder.config, layers))
        try:
            drafter = Streaming(config, shared)
            drafter._start(draft_to_target)
            alike = drafter._runs_as(model)
        except (AttributeError, TypeError, RuntimeError) as error:
            raise DrafterRefused(f"streams cannot go through layers of this kind ({error}): {OTHERS}") from error
        if not alike:
            raise DrafterRefused(f"the target's last layers do not run alike apart from it: {OTHERS}")
        return drafter

    def remember(self, hidden: Tensor, positions: Tensor, memory: Cache | KeyValues) -> None:
        """Fill a memory with the main stream's keys and values, from the inputs [B, n, F] of the layers.

        positions [B or 1, n]. Without the adapters: these are the target's own.
        """
        cache = cast(Cache, memory)
        inputs = hidden.chunk(len(self.taps), dim=-1)
        cos, sin = self.decoder.rotary_emb(inputs[0], position_ids=positions)
        for at, (layer, states) in enumerate(zip(self.decoder.layers, inputs, strict=True)):
            attention, normed = layer.self_attn, layer.input_layernorm(states)
            heads = (*normed.shape[:2], -1, attention.head_dim)
            keys = attention.k_proj.base(normed).view(heads)
            keys = attention.k_norm(keys) if hasattr(attention, "k_norm") else keys
            keys = keys.transpose(1, 2)
            values = attention.v_proj.base(normed).view(heads).transpose(1, 2)
            cache.update(apply_rotary_pos_emb(keys, keys, cos, sin)[1], values, at)

    def read(
        self, streams: Tensor, positions: Tensor, mask: Tensor | dict[str, Tensor], memory: Cache | KeyValues
    ) -> Tensor:
        """Streams [B, m, H] after the last layer and the final norm; they see what `mask` admits of the memory."""
        out = self.decoder(
            inputs_embeds=streams, position_ids=positions, attention_mask=mask, cache=memory, use_cache=True
        )
        after: Tensor = out.last_hidden_state
        return after

    def begun(self, states: Tensor) -> Tensor:
        """The streams as they begin beside main states [..., H]: [..., gamma, H]. What is added is of their size."""
        size = (states.square().mean(-1, keepdim=True) + TINY).sqrt()
        added: Tensor = self.begin(states / size)[..., None, :] + self.identifiers
        return states[..., None, :] + size[..., None] * added

    def follow(self, memory: KeyValues | None, rows: list[FollowRow], hidden: Tensor) -> Tensor:
        """Keep the main stream's keys and values; the state is M [B, H] of each row's last token."""
        assert memory is not None, "streams attend to the main one"
        hidden = hidden.to(self.dtype)
        place = memory.begin([row.start for row in rows], hidden.shape[1])
        self.remember(hidden, place.positions, memory)
        return last_states(rows, hidden.chunk(len(self.taps), dim=-1)[0])

    def propose(self, memory: KeyValues | None, rows: list[DraftRow], shape: Shape) -> Proposal:
        """One launch for all streams; they stand in the memory where the tokens that they say will stand."""
        assert memory is not None, "streams attend to the main one"
        streams = self.begun(kept_states(rows))[:, : shape.depth]
        place = memory.begin([row.start for row in rows], streams.shape[1])
        said = self.logits(self.read(streams, place.positions, place.mask, memory))
        return propose_apart(self, rows, shape, lambda depth: said[:, depth])

    def unrolled(self, tokens: Tensor, hidden: Tensor | None, positions: Tensor | None, depth: int) -> Iterator[Tensor]:
        """Stream j + 1 of the token before, at every depth j; positions that start again part texts."""
        assert hidden is not None, "a drafter with taps is given hidden states"
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        memory, hidden = DynamicCache(), hidden.to(self.dtype)
        self.remember(hidden, positions, memory)
        streams = self.begun(hidden.chunk(len(self.taps), dim=-1)[0])
        for j in range(min(depth, self.depths)):
            mask = _mask(positions, j, self.dtype)
            yield shifted(self.read(streams[..., j, :], positions + 1 + j, mask, memory), 1)

    def fresh(self) -> "Streaming":
        return Streaming(self.config, self.shared)

    def shared_names(self) -> set[str]:
        theirs = {name for name in self.decoder.state_dict() if low_rank.ADAPTER not in name}
        return {"head.weight", *(f"decoder.{name}" for name in theirs)}

    @torch.no_grad()
    def map_vocabulary(self) -> None:
        super().map_vocabulary()
        self.head.weight.copy_(self.shared.head[self.draft_to_target])

    @property
    def dtype(self) -> torch.dtype:
        return self.shared.embedding.dtype

    @torch.no_grad()
    def _start(self, draft_to_target: Tensor) -> None:
        low_rank.start(self, torch.Generator(self.draft_to_target.device).manual_seed(0))
        self.draft_to_target.copy_(draft_to_target)
        self.map_vocabulary()

    @torch.no_grad()
    def _runs_as(self, model: Any) -> bool:
        """Whether the layers, not yet adapted, make of their inputs what the target makes, with the same memory."""
        tokens = self.draft_to_target[:TRIED][None]
        taps = Taps(model, (*self.taps, FINAL))
        with taps.reading():
            model.get_decoder()(input_ids=tokens.to(model.device))
        *inputs, final = taps.hidden().to(self.shared.embedding).chunk(len(self.taps) + 1, dim=-1)
        positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        run: Any = DynamicCache()
        remembered: Any = DynamicCache()
        causal = _mask(positions, 0, self.dtype)[..., : tokens.shape[1]]
        found = self.read(inputs[0], positions, causal, run)
        self.remember(torch.cat(inputs, dim=-1), positions, remembered)
        pairs = [(found, final)]
        for one, other in zip(run.layers, remembered.layers, strict=True):
            pairs += [(other.keys, one.keys), (other.values, one.values)]
        return all(float((a - b).norm()) <= NEAR * float(b.norm()) for a, b in pairs)


def _share(decoder: Any, shared: Shared, first: int) -> None:
    """Put the target's layers from `first` on, and its final norm, in place of the decoder's: no copies, and frozen."""
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


def _mask(positions: Tensor, depth: int, dtype: torch.dtype) -> Tensor:
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
