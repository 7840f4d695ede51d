"""The `mtp` drafter: multi-token prediction by one sequential module (DeepSeek-V3, arXiv 2412.19437, 2.2).

The module joins the normed last hidden state with the normed embedding of the next token (eq. 21), runs one layer over
that (eq. 22) and says the token after through the target's own head (eq. 23). It is applied again on its own state for
each further depth, as DeepSeek's released single module is; Gloeckle et al. (arXiv 2404.19737), who trained such heads
first, have one layer a depth on the last hidden state and share the head alike (2, figure 1). Losses of all depths
count the same (eq. 25).

The head is the target's, frozen, cut to the draft vocabulary: it is no part of a version and learns nothing.
"""

from typing import Any

import torch
from torch import Tensor

from adapter.drafters.layer import LayerConfig, LayerDrafter
from adapter.drafters.shared import Shared
from adapter.taps import FINAL


class Mtp(LayerDrafter):
    """The layer on the last hidden state, under the target's head."""

    kind = "mtp"

    def __init__(self, config: LayerConfig, shared: Shared) -> None:
        super().__init__(config, shared)
        self.head = shared.head_of(self.draft_to_target)

    @staticmethod
    def from_target(model: Any, shared: Shared, draft_to_target: Tensor, depths: int) -> "Mtp":
        """Version 1, from the target's last layer. Raises `DrafterRefused` where that cannot be taken."""
        drafter = Mtp(LayerConfig.of(model, (FINAL,), depths, len(draft_to_target)), shared)
        drafter.start(model, draft_to_target)
        return drafter

    def features(self, hidden: Tensor) -> Tensor:
        """The last hidden states as they are."""
        return hidden

    def fresh(self) -> "Mtp":
        return Mtp(self.config, self.shared)

    def shared_names(self) -> set[str]:
        return {*super().shared_names(), "head.weight"}

    @torch.no_grad()
    def map_vocabulary(self) -> None:
        super().map_vocabulary()
        self.head.weight.copy_(self.shared.head[self.draft_to_target])
