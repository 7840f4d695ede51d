"""The teacher rows of a record: the target's distribution at chosen output positions, cut to its top K.

The mass outside the K is kept as a bucket of its own: renormalising the K overstates acceptance badly
(osd.md 5.7).
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from storage.records import TeacherRows


def teacher_rows(positions: Sequence[int], logits: Tensor, top_k: int) -> TeacherRows:
    """Rows at the ascending output `positions` from the target's logits [R, V] (temperature 1, unprocessed).

    logits[r] are those *before* the token at output index positions[r]: the row teaches that token.
    """
    log_probs = logits.detach().float().log_softmax(-1)
    top = log_probs.topk(min(top_k, log_probs.shape[-1]), dim=-1)
    tail = log_probs.scatter(-1, top.indices, float("-inf")).logsumexp(-1).clamp(max=0.0)
    return TeacherRows(
        top_k=top.indices.shape[-1],
        positions=np.asarray(positions, dtype="<i4").tobytes(),
        ids=top.indices.to(torch.int32).cpu().numpy().astype("<i4").tobytes(),
        log_probs=top.values.half().cpu().numpy().astype("<f2").tobytes(),
        tail_log_mass=tail.cpu().numpy().astype("<f4").tobytes(),
    )
