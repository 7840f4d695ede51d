"""One decoder layer conditioned on the target's hidden states: what the `eagle` and `mtp` drafters have in common.

The layer reads pairs: a token, and the state of the token before it. In verified text that state comes from the
target; in a proposal it is the layer's own output at the token before, fed back. Both are normed, joined and projected
to one vector, the layer runs over them with keys and values of its own, and its normed output is the next state,
from which the kind's head says the next token. The kinds differ in which hidden states they are given, and in the head.

Training unrolls the layer over its own outputs (the training-time test of EAGLE-3, arXiv 2503.01840, 3.2 and figure 6):
at depth j the layer reads its own depth j - 1 outputs, and attends to verified pairs up to where the proposal began and
to its own ones after that, exactly as it does while it proposes.
"""

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache

from adapter.drafters.conditioned import kept_states, last_states, propose, shifted
from adapter.drafters.decoders import decoder_around, embedding_name, full_layers, run
from adapter.drafters.learnt import DrafterRefused, LearntDrafter
from adapter.drafters.protocol import DraftRow, FollowRow, KeyValues, Level, Proposal, Shape
from adapter.drafters.shared import Shared
from adapter.masks import additive


@dataclass(frozen=True)
class LayerConfig:
    """What is needed to build the drafter again, beside its weights and what it shares with the target."""

    depths: int  # how deep it is trained, and proposes at most
    draft_vocab: int
    taps: tuple[int, ...]
    decoder: dict[str, Any]  # the transformers configuration of a decoder of one layer

    @property
    def shape(self) -> str:
        read = ", ".join("the last hidden state" if tap < 0 else f"layer {tap}" for tap in self.taps)
        return f"1 layer on {read}, {self.depths} deep, {self.draft_vocab} draft tokens"

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "taps": list(self.taps)}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> "LayerConfig":
        return LayerConfig(data["depths"], data["draft_vocab"], tuple(data["taps"]), dict(data["decoder"]))

    @staticmethod
    def of(model: Any, taps: tuple[int, ...], depths: int, draft_vocab: int) -> "LayerConfig":
        """A layer like the target `model`'s. Raises `DrafterRefused` where it cannot be."""
        if depths < 1:
            raise DrafterRefused(f"a drafter that is {depths} deep: ask for 1 at least")
        decoder = model.get_decoder()
        if decoder.get_input_embeddings().weight.shape[1] != decoder.config.hidden_size:
            raise DrafterRefused("the target's embedding is not as wide as its hidden states: use causal_lm")
        return LayerConfig(depths, draft_vocab, taps, full_layers(decoder.config, 1))


class LayerDrafter(LearntDrafter):
    """The layer and how it runs; `features` and the head are the kind's."""

    config: LayerConfig

    def __init__(self, config: LayerConfig, shared: Shared) -> None:
        """Random weights of the shape that `config` tells, around the target's embedding, kept frozen."""
        super().__init__(config.draft_vocab, shared.embedding)
        self.config, self.shared = config, shared
        self.taps, self.depths = config.taps, config.depths
        self.decoder = decoder_around(config.decoder, shared.embedding)
        hidden = shared.embedding.shape[1]
        self.token_norm, self.state_norm = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.project = nn.Linear(2 * hidden, hidden, bias=False)
        for part in (self.token_norm, self.state_norm, self.project):
            part.to(dtype=shared.embedding.dtype, device=shared.embedding.device)

    @abstractmethod
    def features(self, hidden: Tensor) -> Tensor:
        """The target's hidden states [..., F] as states [..., H] of the layer."""

    def read(
        self,
        tokens: Tensor,
        states: Tensor,
        positions: Tensor,
        mask: Tensor | dict[str, Tensor],
        memory: Cache | KeyValues,
    ) -> Tensor:
        """The states [B, n, H] after pairs of tokens [B, n] and the states [B, n, H] before them."""
        embedded = self.decoder.get_input_embeddings()(tokens)
        joined = torch.cat([self.token_norm(embedded), self.state_norm(states)], dim=-1)
        return run(self.decoder, self.project(joined), positions, mask, memory)

    def follow(self, memory: KeyValues | None, rows: list[FollowRow], hidden: Tensor) -> Tensor:
        """Read the verified pairs; the state [B, H] after each row's last one."""
        assert memory is not None, "the layer has keys and values"
        place = memory.begin([row.start for row in rows], hidden.shape[1])
        padding = [0] * hidden.shape[1]
        tokens = torch.tensor([(row.following + padding)[: hidden.shape[1]] for row in rows], device=hidden.device)
        states = self.read(tokens, self.features(hidden.to(self.dtype)), place.positions, place.mask, memory)
        return last_states(rows, states)

    def propose(self, memory: KeyValues | None, rows: list[DraftRow], shape: Shape) -> Proposal:
        """The head's choice from the kept states, and then from the layer's own, depth by depth."""
        assert memory is not None, "the layer has keys and values"
        states = kept_states(rows)[:, None]
        first = self.logits(states[:, 0])

        def step(level: Level) -> Tensor:
            nonlocal states
            before = states.gather(1, level.above[..., None].expand(-1, -1, states.shape[2]))
            place = memory.begin(level.starts, level.tokens.shape[1], branches=level.branches)
            states = self.read(level.tokens, before, place.positions, place.mask, memory)
            return self.logits(states)

        return propose(self, rows, shape, first, step)

    def unrolled(self, tokens: Tensor, hidden: Tensor | None, positions: Tensor | None, depth: int) -> Iterator[Tensor]:
        """Its states where the tokens proposed before were those of the text; positions that start again part texts."""
        assert hidden is not None, "a drafter with taps is given hidden states"
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        unrolling = _Unrolling(positions, self.dtype)
        states = shifted(self.features(hidden.to(self.dtype)), 1)
        for j in range(min(depth, self.depths)):
            after = self.read(tokens, states, unrolling.positions, unrolling.mask(j), unrolling.memory)
            yield shifted(after, -j)
            states = shifted(after, 1)

    def shared_names(self) -> set[str]:
        return {f"decoder.{embedding_name(self.decoder)}"}

    @torch.no_grad()
    def start(self, model: Any, draft_to_target: Tensor) -> None:
        """Take the target's last layer and final norm; the projection starts as the sum of token and state."""
        decoder = model.get_decoder()
        theirs, last = decoder.state_dict(), decoder.config.num_hidden_layers - 1
        left_alone = embedding_name(self.decoder)
        for name, tensor in self.decoder.state_dict().items():
            found = theirs.get(name.replace(".0.", f".{last}.", 1) if name.startswith(LAYERS) else name)
            if name != left_alone and (found is None or found.shape != tensor.shape):
                raise DrafterRefused(f"the target's last layer is not one that can be taken ({name}): use causal_lm")
            if name != left_alone and found is not None:
                tensor.copy_(found)
        self.project.weight.copy_(torch.eye(self.project.out_features).repeat(1, 2))
        self.draft_to_target.copy_(draft_to_target)
        self.map_vocabulary()


LAYERS = ("layers.0.", "h.0.")  # what decoders call their first layer


class _Unrolling:
    """What the layer remembers while it is unrolled over its own states: the pairs of all depths so far.

    Depth j's pair at index t belongs to the proposal after the text up to index t - j. It sees the verified pairs up
    to there, and of the depths d = 1 .. j each the one pair of the same proposal.
    """

    def __init__(self, positions: Tensor, dtype: torch.dtype) -> None:
        """positions [B or 1, n]; at a text's first token there is no pair, as there is no state before it."""
        self.positions = (positions - 1).clamp_min(0)
        self.memory = DynamicCache()
        self._dtype = dtype
        self._text = (positions == 0).cumsum(-1)
        self._first = positions == 0
        self._blocks: list[Tensor] = []

    def mask(self, depth: int) -> Tensor:
        """Additive [B or 1, 1, n, (depth + 1) n]: 0 where a pair of this depth may attend."""
        n = self._first.shape[1]
        index = torch.arange(n, device=self._first.device)
        back = index[:, None] - index  # how far behind the pair stands what is seen
        itself = (back == 0)[None]
        same = self._text[:, :, None] == self._text[:, None, :]
        verified = (back >= depth)[None] & same & ~self._first[:, None, :]
        own = [(back == depth - d)[None].expand_as(verified) for d in range(1, depth + 1)]
        seen = torch.cat([verified | itself if depth == 0 else verified, *own], dim=-1)
        return additive(seen, self._dtype)
