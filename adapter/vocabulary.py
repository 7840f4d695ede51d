"""The draft vocabulary: which of the target's tokens the drafter may propose.

Chosen once, from sample prompts and the target's answers to them, and then kept for all versions. It bounds
the acceptance probability by the target's mass on it (osd.md 5.3), and makes the head several times cheaper.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Counts = npt.NDArray[np.int64]


def count_tokens(sequences: Iterable[npt.NDArray[np.int32]], vocab_size: int) -> Counts:
    """How often each token occurs: [V]."""
    total = np.zeros(vocab_size, dtype=np.int64)
    for sequence in sequences:
        total += np.bincount(sequence, minlength=vocab_size)
    return total


def choose_draft_vocabulary(emitted: Counts, prompted: Counts, size: int, always: Sequence[int] = ()) -> Tensor:
    """`draft_to_target`: ascending target ids, int64 [min(size, V)].

    In this order until `size` is reached: `always` (special tokens), then by how often the target `emitted`
    a token [V], then by how often it was `prompted` [V], then the lowest ids, which byte-pair encoding
    gives to the most frequent merges.
    """
    first = np.zeros(len(emitted), dtype=bool)
    first[list(always)] = True
    order = np.lexsort((np.arange(len(emitted)), -prompted, -emitted, ~first))
    return torch.from_numpy(np.sort(order[:size]).astype(np.int64))
