"""What of the target a drafter is built around: tensors that stay the target's, frozen, and part of no version."""

from collections.abc import Collection
from dataclasses import dataclass, field
from functools import cached_property

from torch import Tensor, nn

from adapter.fingerprints import TargetFiles
from adapter.target import load_decoder_tensors, load_head


@dataclass(frozen=True)
class Shared:
    """Everything that a drafter has beside these starts in the embedding's dtype and on its device."""

    embedding: Tensor  # [V, H], the target's input embedding
    files: TargetFiles
    _read: dict[str, Tensor] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def head(self) -> Tensor:
        """[V, H]: what the target's head multiplies hidden states with; read at first use."""
        head = load_head(self.files)
        return self.embedding if head is None else head.to(self.embedding)

    def head_of(self, draft_to_target: Tensor) -> nn.Linear:
        """The rows of the head of some tokens [V_d], frozen: states [..., H] to logits [..., V_d]."""
        head = nn.Linear(self.head.shape[1], len(draft_to_target), bias=False)
        head.weight = nn.Parameter(self.head[draft_to_target], requires_grad=False)
        return head

    def decoder_tensors(self, names: Collection[str]) -> dict[str, Tensor]:
        """Tensors of the target's decoder by its own names for them, those that its files hold.

        Read at first use, and the same ones for everybody after that.
        """
        missing = set(names) - self._read.keys()
        if missing:
            found = load_decoder_tensors(self.files, missing)
            self._read.update({name: tensor.to(self.embedding) for name, tensor in found.items()})
        return {name: self._read[name] for name in names if name in self._read}
