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

CHUNK = 64  # tokens: vocabularies are most often padded to a multiple of it
SMALL = -10.0  # log of a mass under which 1 minus the rest is off by more than some percent


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
    all_log_probs = logits.detach().log_softmax(-1, dtype=torch.float32)
    log_probs, ids = largest(all_log_probs, min(top_k, logits.shape[-1]))
    tail = torch.log(1.0 - log_probs.exp().sum(-1))
    small = (~(tail > SMALL)).nonzero()[:, 0]  # there the difference has lost its digits
    if len(small):
        outside = all_log_probs[small].scatter(-1, ids[small], float("-inf"))
        tail[small] = outside.logsumexp(-1).clamp(max=0.0)
    return ids.to(torch.int32).cpu().numpy(), log_probs.half().cpu().numpy(), tail.cpu().numpy()


def largest(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """As `values.topk(k)` of [R, V], in half the time: the k largest lie in the k chunks with the largest maxima."""
    rows, size = values.shape
    if size % CHUNK or size <= k * CHUNK:
        return values.topk(k)
    chunks = values.view(rows, -1, CHUNK)
    chosen = chunks.amax(-1).topk(k, sorted=False).indices
    within = chunks.gather(1, chosen[:, :, None].expand(rows, k, CHUNK)).view(rows, -1)
    found, places = within.topk(k)
    return found, chosen.gather(1, places // CHUNK) * CHUNK + places % CHUNK
