"""The `eagle` drafter, by EAGLE-3's recipe (Li et al., arXiv 2503.01840): a layer on fused hidden states.

Low, middle and high hidden states of the target are joined and brought to one vector g (3.1, figure 5); the layer reads
g with the token's embedding, and in a proposal its own output a in place of g. Features are not learnt for their own
sake: the loss is on the tokens alone, over the depths of the training-time test (3.2), depth j with weight 0.8^j as in
the published code. The head is the drafter's own, over a reduced draft vocabulary. The layer, the final norm and the
head start as the target's last layer, norm and head; the fused vector starts as the high one. Each of the three is
normed before they are joined, as their sizes differ by orders of magnitude.

Chains and trees come from `tree.grow`, as in EAGLE-2 (arXiv 2406.16858).
"""

from typing import Any

import torch
from torch import Tensor, nn

from adapter.drafters.layer import LayerConfig, LayerDrafter
from adapter.drafters.shared import Shared


class Eagle(LayerDrafter):
    """The layer on fused features, with a head of its own."""

    kind = "eagle"
    depth_decay = 0.8

    def __init__(self, config: LayerConfig, shared: Shared) -> None:
        super().__init__(config, shared)
        hidden = shared.embedding.shape[1]
        self.norms = nn.ModuleList(nn.RMSNorm(hidden) for _ in config.taps)
        self.fuse = nn.Linear(hidden * len(config.taps), hidden, bias=False)
        self.head = nn.Linear(hidden, config.draft_vocab, bias=False)
        for part in (self.norms, self.fuse, self.head):
            part.to(dtype=shared.embedding.dtype, device=shared.embedding.device)

    @staticmethod
    def from_target(model: Any, shared: Shared, draft_to_target: Tensor, depths: int) -> "Eagle":
        """Version 1, from the target's last layer. Raises `DrafterRefused` where that cannot be taken."""
        taps = fused_taps(model.get_decoder().config.num_hidden_layers)
        drafter = Eagle(LayerConfig.of(model, taps, depths, len(draft_to_target)), shared)
        drafter.start(model, draft_to_target)
        with torch.no_grad():
            high = torch.eye(drafter.fuse.out_features)
            drafter.fuse.weight.zero_()
            drafter.fuse.weight[:, -len(high) :].copy_(high)
            drafter.head.weight.copy_(model.get_output_embeddings().weight[drafter.draft_to_target])
        return drafter

    def features(self, hidden: Tensor) -> Tensor:
        """g [..., H] from the low, middle and high states [..., 3 H]."""
        parts = hidden.chunk(len(self.norms), dim=-1)
        fused: Tensor = self.fuse(torch.cat([norm(part) for norm, part in zip(self.norms, parts, strict=True)], -1))
        return fused

    def fresh(self) -> "Eagle":
        return Eagle(self.config, self.shared)


def fused_taps(layers: int) -> tuple[int, ...]:
    """The low, middle and high layers whose outputs are read, as the published code has them; fewer where there are."""
    return tuple(sorted({min(2, layers), max(1, layers // 2), max(1, layers - 3)}))
