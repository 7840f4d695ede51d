"""The teacher rows of a record: the target's distribution at chosen output positions, cut to its top K.

The mass outside the K is kept as a bucket of its own: renormalising the K overstates acceptance badly
(osd.md 5.7).
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from storage.records import TeacherRows


def teacher_rows(positions: Sequence[int], logits: Tensor, top_k: int) -> TeacherRows:
    """Rows at the ascending output `positions` from the target's logits [R, V] (temperature 1, unprocessed).

    logits[r] are those *before* the token at output index positions[r]: the row teaches that token.
    """
    ids, log_probs, tail = top_rows(logits, top_k)
    return TeacherRows(
        top_k=ids.shape[-1],
        positions=np.asarray(positions, dtype="<i4").tobytes(),
        ids=ids.astype("<i4").tobytes(),
        log_probs=log_probs.astype("<f2").tobytes(),
        tail_log_mass=tail.astype("<f4").tobytes(),
    )


def top_rows(
    logits: Tensor, top_k: int
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float16], npt.NDArray[np.float32]]:
    """Of logits [R, V]: the top K ids [R, K], their log-probabilities [R, K], and the log of the mass outside [R]."""
    log_probs = logits.detach().float().log_softmax(-1)
    top = log_probs.topk(min(top_k, log_probs.shape[-1]), dim=-1)
    tail = log_probs.scatter(-1, top.indices, float("-inf")).logsumexp(-1).clamp(max=0.0)
    return top.indices.to(torch.int32).cpu().numpy(), top.values.half().cpu().numpy(), tail.cpu().numpy()
