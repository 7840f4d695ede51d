"""The `streaming` drafter: speculative streams beside the target's main one (Bhendawade et al., arXiv 2402.11131).

Streams j = 1 .. gamma begin at the main stream's state M[t] after layer N - Ns, as f(M[t]) + P[j], f the identity and
something of a low rank and P[j] a vector of the stream's own (eq. 3), and go through the target's last Ns layers, final
norm and head, which are frozen. In each layer stream j of token t attends to the main stream up to t and to the streams
1 to j of t (multi-stream attention, eq. 2). Low-rank adapters on these layers act on the streams alone: the main stream
is the target's, bit for bit. Stream j says token t + 1 + j, all of them at once, and stands at position t + j. They
learn the next n-gram together, stream j with weight 0.8^(j - 1).

A drafter's `passes` says when they do:
- 1: in the pass that verifies, as in the paper. The streams of all tokens under verification ride along (`riding`),
  over the target's own keys and values, and when the round is decided those of the accepted position have been through.
  For each the likeliest tokens are kept, in the room of one hidden state, and proposed from; sampled rows draw from
  them.
- 2: in a pass of their own after it, of the accepted token's gamma streams alone: one more launch a round, for fewer
  streams. Kept is M[t], and the main stream's keys and values in these layers, projected again from what the taps read.
One pass saves a launch, that second memory and the gap in it after plain rounds; two spare the k streams of each token
that is not looked at. On a CPU, where nothing waits for a launch, two are a little faster: with 4 streams in the last
of SmolLM2's 30 layers a round of a chain of 4 is 1.15 plain ones (one pass: 1.16), and that of a tree of 16 is 1.60
(1.66); in two layers 1.17 (1.19) and 1.70 (1.86). So it is 2 unless asked otherwise.

The early exit of the paper's pruning is one more head of a low rank, on the main stream after two thirds of the layers:
it says what follows a token, by which the engine drops a tree's unlikely branches there (service/engine/pruning). The
paper has it before the streams' layers; the earlier, the more is saved. The tree itself is the Cartesian product of the
streams' choices within the node budget, as with Medusa.

The shared layers are read from the target's files once for all versions, as the head is, and are part of none; where
a version is served beside the target, it goes through the target's own, packed as they are.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from adapter.drafters import candidates, last_layers, low_rank
from adapter.drafters.conditioned import kept_states, last_states, propose_apart, shifted
from adapter.drafters.decoders import decoder_around, full_layers, run
from adapter.drafters.early_exit import LowRankExit, chosen_log_probs
from adapter.drafters.last_layers import OTHERS
from adapter.drafters.learnt import DrafterRefused, LearntDrafter
from adapter.drafters.protocol import DraftRow, FollowRow, KeyValues, Passing, Proposal, Reading, Shape
from adapter.drafters.riding import Riding
from adapter.drafters.shared import Shared

PASSES = 2
EXIT = (2, 3)  # of the target's layers that run before the early exit
FORMERLY = {"passes": 2, "exit_rank": 0, "exit_layer": 0}


@dataclass(frozen=True)
class StreamingConfig:
    """What is needed to build the drafter again, beside its weights and what it shares with the target."""

    streams: int  # gamma
    rank: int  # of the adapters
    draft_vocab: int
    taps: tuple[int, ...]  # the inputs of the layers that streams go through: N - Ns to N - 1
    decoder: dict[str, Any]  # the transformers configuration of a decoder of these layers
    passes: int = PASSES
    exit_rank: int = 0  # of the early exit; 0: none
    exit_layer: int = 0  # how many layers have run before it

    @property
    def shape(self) -> str:
        return (
            f"{self.streams} streams in the last {len(self.taps)} layers, rank {self.rank}, "
            f"{self.passes} passes a round, {self.draft_vocab} draft tokens"
        )

    def to_dict(self) -> dict[str, Any]:
        """What is as it was before there was a choice is left out: so versions of that time can be loaded."""
        found = {**asdict(self), "taps": list(self.taps)}
        return {name: value for name, value in found.items() if FORMERLY.get(name) != value}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> "StreamingConfig":
        return StreamingConfig(**{**data, "taps": tuple(data["taps"]), "decoder": dict(data["decoder"])})


class Streaming(LearntDrafter):
    """Stream vectors and adapters, around the target's last layers and the draft tokens' rows of its head."""

    kind = "streaming"
    depth_decay = 0.8
    config: StreamingConfig

    def __init__(self, config: StreamingConfig, shared: Shared) -> None:
        """Random adapters of the shape that `config` tells. Raises `DrafterRefused` where the layers are not there."""
        super().__init__(config.draft_vocab, shared.embedding)
        self.config, self.shared = config, shared
        self.taps = (*config.taps, config.exit_layer) if config.exit_rank else config.taps
        self.depths = config.streams
        self.decoder = decoder_around(config.decoder, shared.embedding)
        last_layers.share(self.decoder, shared, config.taps[0])
        low_rank.adapt(self.decoder.layers, config.rank)
        hidden = shared.embedding.shape[1]
        self.begin = low_rank.LowRank(hidden, hidden, config.rank)
        self.exit = LowRankExit(hidden, config.exit_rank) if config.exit_rank else None
        for part in (self.begin, self.exit):
            if part is not None:
                part.to(dtype=self.dtype, device=shared.embedding.device)
        self.identifiers = nn.Parameter(shared.embedding.new_zeros(config.streams, hidden))
        self.head = shared.head_of(self.draft_to_target)

    @staticmethod
    def from_target(
        model: Any,
        shared: Shared,
        draft_to_target: Tensor,
        streams: int,
        layers: int,
        rank: int,
        passes: int = PASSES,
    ) -> "Streaming":
        """Streams that start as copies of the main one, each at its place. Raises `DrafterRefused`."""
        decoder = model.get_decoder()
        present = decoder.config.num_hidden_layers
        if streams < 1 or rank < 1:
            raise DrafterRefused(f"{streams} streams with adapters of rank {rank}: ask for 1 at least")
        if not 1 <= layers <= present:
            raise DrafterRefused(f"streams in {layers} layers of a target of {present}: ask for 1 to {present}")
        if passes not in (1, 2):
            raise DrafterRefused(f"streams in {passes} passes a round: ask for 1 or 2")
        taps = tuple(range(present - layers, present))
        shape = full_layers(decoder.config, layers)
        leaves = min(present * EXIT[0] // EXIT[1], taps[0])
        config = StreamingConfig(streams, rank, len(draft_to_target), taps, shape, passes, rank, leaves)
        try:
            drafter = Streaming(config, shared)
            drafter._start(draft_to_target)
            alike = last_layers.run_alike(drafter, model)
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
        inputs = self._inputs(hidden)
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
        return run(self.decoder, streams, positions, mask, memory)

    def begun(self, states: Tensor) -> Tensor:
        """The streams as they begin beside main states [..., H]: [..., gamma, H]. What is added is of their size."""
        size, unit = low_rank.scaled(states)
        added: Tensor = self.begin(unit)[..., None, :] + self.identifiers
        return states[..., None, :] + size[..., None] * added

    @property
    def rides(self) -> bool:
        return self.config.passes == 1

    def join(self, model: Any) -> None:
        last_layers.join(self.decoder, model, self.taps[0])

    def reads(self, model: Any, passing: Passing, last: bool) -> Reading:
        """What the streams ended as, where they ride; else the layers' inputs."""
        return Riding(self, model, passing, last) if self.rides else super().reads(model, passing, last)

    def follow(self, memory: KeyValues | None, rows: list[FollowRow], hidden: Tensor) -> Tensor:
        """Of each row's last token the state [B, S]: M, or what its streams say."""
        if self.rides:
            ended = last_states(rows, hidden).view(len(rows), self.depths, -1)
            return candidates.kept(self.logits(ended), candidates.most(ended.shape[-1], self.dtype, self.depths))
        assert memory is not None, "streams attend to the main one"
        hidden = hidden.to(self.dtype)
        place = memory.begin([row.start for row in rows], hidden.shape[1])
        self.remember(hidden, place.positions, memory)
        return last_states(rows, self._inputs(hidden)[0])

    def propose(self, memory: KeyValues | None, rows: list[DraftRow], shape: Shape) -> Proposal:
        """From what the streams say; they stand in the memory where the tokens that they say will stand."""
        states = kept_states(rows)
        if self.rides:
            said = candidates.logits_of(states, self.depths, self.config.draft_vocab)
            return propose_apart(self, rows, shape, lambda depth: said[:, depth])
        assert memory is not None, "streams attend to the main one"
        streams = self.begun(states)[:, : shape.depth]
        place = memory.begin([row.start for row in rows], streams.shape[1])
        said = self.logits(self.read(streams, place.positions, place.mask, memory))
        return propose_apart(self, rows, shape, lambda depth: said[:, depth])

    @property
    def early(self) -> "Streaming | None":
        """Itself."""
        return None if self.exit is None else self

    @property
    def layer(self) -> int:
        """Of the early exit."""
        return self.config.exit_layer

    def log_probs(self, states: Tensor, tokens: Tensor) -> Tensor:
        """Of the early exit."""
        return chosen_log_probs(self.logits(self._left(states)), self.target_to_draft[tokens])

    def exit_states(self, hidden: Tensor) -> Tensor | None:
        return None if self.exit is None else self._left(hidden.chunk(len(self.taps), dim=-1)[-1])

    def _left(self, states: Tensor) -> Tensor:
        """States [..., H] of the layer before the early exit, as its head reads them."""
        assert self.exit is not None, "it has an early exit"
        ended: Tensor = self.decoder.norm(self.exit(states.to(self.dtype)))
        return ended

    def _inputs(self, hidden: Tensor) -> tuple[Tensor, ...]:
        """Those of the layers that streams go through, M the first, of what the taps read [B, n, F]."""
        return hidden.chunk(len(self.taps), dim=-1)[: len(self.config.taps)]

    def unrolled(self, tokens: Tensor, hidden: Tensor | None, positions: Tensor | None, depth: int) -> Iterator[Tensor]:
        """Stream j + 1 of the token before, at every depth j; positions that start again part texts."""
        assert hidden is not None, "a drafter with taps is given hidden states"
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        memory, hidden = DynamicCache(), hidden.to(self.dtype)
        self.remember(hidden, positions, memory)
        streams = self.begun(self._inputs(hidden)[0])
        for j in range(min(depth, self.depths)):
            mask = last_layers.mask_of_depth(positions, j, self.dtype)
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

    @torch.no_grad()
    def _start(self, draft_to_target: Tensor) -> None:
        low_rank.start(self, torch.Generator(self.draft_to_target.device).manual_seed(0))
        self.draft_to_target.copy_(draft_to_target)
        self.map_vocabulary()
