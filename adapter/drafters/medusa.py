"""The `medusa` drafter: several heads on the target's last hidden state (Medusa-1, Cai et al., arXiv 2401.10774).

Head j is a residual block and a head over the draft vocabulary (2.1.1): softmax(W2 (SiLU(W1 h) + h)), with W1 zero and
W2 the target's head at first, so that each starts as the target's own. The target is frozen; the heads learn with
weights 0.8^j (2.2.1). Head 0 says the token after the one that the target has just said, as the paper's first head.

The heads do not see one another's tokens, so the Cartesian product of their likeliest ones is a tree (2.1.2), of which
the nodes of the highest products are proposed. Verification is the exact one of all kinds; the paper's typical
acceptance, which changes the output, is there for requests that ask for it (adapter/typical). No memory: a row's state
is the target's last hidden state.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from adapter.drafters.conditioned import kept_states, last_states, propose_apart, shifted
from adapter.drafters.learnt import DrafterRefused, LearntDrafter
from adapter.drafters.protocol import DraftRow, FollowRow, KeyValues, Proposal, Shape
from adapter.drafters.shared import Shared
from adapter.taps import FINAL


@dataclass(frozen=True)
class MedusaConfig:
    """What is needed to build the drafter again, beside its weights."""

    heads: int
    draft_vocab: int

    @property
    def shape(self) -> str:
        return f"{self.heads} heads, {self.draft_vocab} draft tokens"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> "MedusaConfig":
        return MedusaConfig(data["heads"], data["draft_vocab"])


class MedusaHead(nn.Module):
    """One head: states [..., H] to logits [..., V_d]."""

    def __init__(self, hidden: int, draft_vocab: int) -> None:
        super().__init__()
        self.residual = nn.Linear(hidden, hidden, bias=False)
        self.out = nn.Linear(hidden, draft_vocab, bias=False)

    def forward(self, state: Tensor) -> Tensor:
        logits: Tensor = self.out(state + silu(self.residual(state)))
        return logits


class Medusa(LearntDrafter):
    """As many heads as it proposes tokens."""

    kind = "medusa"
    taps = (FINAL,)
    depth_decay = 0.8
    config: MedusaConfig

    def __init__(self, config: MedusaConfig, shared: Shared) -> None:
        """Random weights; the size of hidden states, dtype and device are those of the target's embedding."""
        super().__init__(config.draft_vocab, shared.embedding)
        self.config, self._shared = config, shared
        self.depths = config.heads
        hidden = shared.embedding.shape[1]
        self.heads = nn.ModuleList(MedusaHead(hidden, config.draft_vocab) for _ in range(config.heads))
        self.heads.to(dtype=shared.embedding.dtype, device=shared.embedding.device)

    @staticmethod
    def from_target(model: Any, shared: Shared, draft_to_target: Tensor, heads: int) -> "Medusa":
        """Heads that all say what the target's own says. Raises `DrafterRefused` where there is none to take."""
        if heads < 1:
            raise DrafterRefused(f"a Medusa drafter of {heads} heads: ask for 1 at least")
        weight = model.get_output_embeddings().weight
        if weight.shape[1] != shared.embedding.shape[1]:
            raise DrafterRefused("the target's hidden states are not as wide as its embedding: Medusa is not for it")
        drafter = Medusa(MedusaConfig(heads, len(draft_to_target)), shared)
        drafter._start(weight, draft_to_target)
        return drafter

    def logits(self, state: Tensor, depth: int = 0) -> Tensor:
        """Hidden states [..., H] of the target to logits [..., V_d] of head `depth`."""
        logits: Tensor = self.heads[depth](state)
        return logits

    def follow(self, memory: KeyValues | None, rows: list[FollowRow], hidden: Tensor) -> Tensor:
        """The last verified token's hidden state [B, H] of each row."""
        return last_states(rows, hidden).to(self.dtype)

    def propose(self, memory: KeyValues | None, rows: list[DraftRow], shape: Shape) -> Proposal:
        """Each head's best tokens, or draws."""
        states = kept_states(rows)
        return propose_apart(self, rows, shape, lambda depth: self.logits(states, depth))

    def unrolled(self, tokens: Tensor, hidden: Tensor | None, positions: Tensor | None, depth: int) -> Iterator[Tensor]:
        """At every depth the hidden state of the token before; the heads differ."""
        assert hidden is not None, "a drafter with taps is given hidden states"
        before = shifted(hidden.to(self.dtype), 1)
        for _ in range(min(depth, self.depths)):
            yield before

    def fresh(self) -> "Medusa":
        return Medusa(self.config, self._shared)

    @torch.no_grad()
    def _start(self, head: Tensor, draft_to_target: Tensor) -> None:
        """W1 zero, W2 the draft tokens' rows of the target's head [V, H]."""
        self.draft_to_target.copy_(draft_to_target)
        self.map_vocabulary()
        for one in self.heads:
            assert isinstance(one, MedusaHead), "there is no other"
            one.residual.weight.zero_()
            one.out.weight.copy_(head[self.draft_to_target])
