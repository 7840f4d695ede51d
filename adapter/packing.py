"""Weights in the order that the CPU's matrix kernels read them, packed once instead of in every pass.

For the few tokens of a decoding round most of a matrix product's time goes into reading the weight, and oneDNN
reads its own blocked order about twice as fast as rows. Results are those of the same kernels. On a GPU, or where
torch was built without oneDNN, nothing changes.
"""

from typing import Any

import torch
from torch import Tensor, nn

TOKENS = 16  # the width that a layout is chosen for; others run on it as well
DTYPES = (torch.float32, torch.bfloat16)


class PackedLinear(nn.Module):
    """A linear layer for inference; `weight` and `state_dict` still give the plain weight [out, in], as a copy."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        self._packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), TOKENS)

    @property
    def weight(self) -> Tensor:
        weight: Tensor = self._packed.to_dense()
        return weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        return out

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight"] = self.weight


def pack(model: nn.Module) -> None:
    """Pack every linear layer of `model`, which only infers from now on; those that cannot be stay as they are."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return
    for name, child in list(model.named_children()):
        if type(child) is nn.Linear and child.weight.device.type == "cpu" and child.weight.dtype in DTYPES:
            setattr(model, name, PackedLinear(child))
        else:
            pack(child)
