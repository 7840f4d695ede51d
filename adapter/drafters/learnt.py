"""A drafter that learns: its own weights, and the draft tokens that it knows. Every kind with weights is one.

A version is `own_tensors()`: all weights and `draft_to_target`, and nothing that is shared with the target (its input
embedding, its head), which stays frozen and is found again wherever a version is loaded.
"""

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn

from adapter.drafters.protocol import DraftRow, EarlyExit, FollowRow, KeyValues, Passing, Proposal, Reading, Shape
from adapter.taps import Taps


class DrafterRefused(ValueError):
    """A drafter that cannot be made as asked; the message says why and what to do."""


class DrafterConfig(Protocol):
    """What is needed to build a drafter again, beside its weights. Stored as JSON with the drafter."""

    @property
    def draft_vocab(self) -> int:
        """V_d: how many tokens it may propose."""

    @property
    def shape(self) -> str:
        """What it consists of, in a few words."""

    def to_dict(self) -> dict[str, Any]:
        """As `from_dict` of its class takes it."""


class LearntDrafter(nn.Module):
    """Draft vocabulary and weights. `draft_to_target` names its V_d tokens in the target's vocabulary of V."""

    kind: str
    taps: tuple[int, ...] = ()
    depths: int = 1
    depth_decay: float = 1.0  # in the loss, depth j weighs depth_decay ** j
    decoder: Any
    config: DrafterConfig
    head: nn.Linear  # over the draft vocabulary, of kinds that have one
    draft_to_target: Tensor  # int64 [V_d], part of a version
    target_to_draft: Tensor  # int64 [V]; -1 for the tokens that the drafter never proposes

    def __init__(self, draft_vocab: int, embedding: Tensor) -> None:
        """The first tokens as vocabulary, until a version is loaded; `embedding` [V, H] gives V and the device."""
        super().__init__()
        self.dtype = embedding.dtype  # that weights and states are in
        self.decoder = None  # no memory, unless a kind has one
        vocabulary = torch.arange(draft_vocab, device=embedding.device)
        self.register_buffer("draft_to_target", vocabulary)
        self.register_buffer("target_to_draft", _inverse(vocabulary, len(embedding)), persistent=False)

    @property
    def vocab_size(self) -> int:
        """V: the size of the target's vocabulary."""
        return len(self.target_to_draft)

    @property
    def rides(self) -> bool:
        return False

    @property
    def early(self) -> EarlyExit | None:
        return None

    def join(self, model: Any) -> None:
        """As `Drafter` has it: for kinds that share layers with the target."""

    def reads(self, model: Any, passing: Passing, last: bool) -> Reading:
        """The taps, of every token."""
        return Taps(model, self.taps, passing)

    def exit_states(self, hidden: Tensor) -> Tensor | None:
        """Of hidden states [..., F], what the early exit's logits are made of, where there is one."""
        return None

    @abstractmethod
    def propose(self, memory: KeyValues | None, rows: list[DraftRow], shape: Shape) -> Proposal:
        """As `Drafter` has it; so are the next two."""

    @abstractmethod
    def follow(self, memory: KeyValues | None, rows: list[FollowRow], hidden: Tensor) -> Tensor: ...

    @abstractmethod
    def unrolled(
        self, tokens: Tensor, hidden: Tensor | None, positions: Tensor | None, depth: int
    ) -> Iterator[Tensor]: ...

    def logits(self, state: Tensor, depth: int = 0) -> Tensor:
        """States [..., H] to logits [..., V_d]; the same at every depth, where a kind has one head."""
        logits: Tensor = self.head(state)
        return logits

    @abstractmethod
    def fresh(self) -> Self:
        """Another drafter of this shape with random weights, around the same shared tensors."""

    def twin(self) -> Self:
        """Another drafter with the same weights, of its own, around the same shared tensors."""
        made = self.fresh()
        made.load_own(self.own_tensors())
        return made

    def shared_names(self) -> set[str]:
        """Names in the state of the tensors that are the target's."""
        return set()

    def own_tensors(self) -> dict[str, Tensor]:
        """What a version consists of: weights and `draft_to_target`, but no tensor of the target's."""
        shared = self.shared_names()
        return {name: tensor for name, tensor in self.state_dict().items() if name not in shared}

    def load_own(self, tensors: Mapping[str, Tensor]) -> None:
        """Fill in a version's tensors; names and shapes must be exactly those of `own_tensors`."""
        expected = self.own_tensors()
        if expected.keys() != tensors.keys():
            raise DrafterRefused(f"tensors do not fit: {sorted(expected.keys() ^ tensors.keys())}")
        self.load_state_dict(dict(tensors), strict=False)
        self.map_vocabulary()

    def trainable(self) -> list[nn.Parameter]:
        """The weights that learning changes: all that are not frozen."""
        return [parameter for parameter in self.parameters() if parameter.requires_grad]

    def map_vocabulary(self) -> None:
        """Bring what follows from `draft_to_target` in line with it."""
        self.target_to_draft.copy_(_inverse(self.draft_to_target, self.vocab_size))


def _inverse(draft_to_target: Tensor, vocab_size: int) -> Tensor:
    """target_to_draft [V] with -1 for what is not in the map [V_d]."""
    inverse = torch.full((vocab_size,), -1, dtype=torch.int64, device=draft_to_target.device)
    inverse[draft_to_target] = torch.arange(len(draft_to_target), device=draft_to_target.device)
    return inverse
