"""What the target has to teach, put aside round by round and cut to its top K many rows at a time.

A row is one position's logits over the whole vocabulary. To cut a few of them every round costs several times as much
as to cut many together, and the round waits for it; so they are held until there are enough, or a request ends.
"""

import torch
from torch import Tensor

from adapter.teacher import top_rows
from service.engine.generation import Generation, TeacherRow

HELD = 16  # rows: more of them fall out of the processor's caches


class Teaching:
    """Rows on their way into their generations' `teacher`; used by the engine's thread alone."""

    def __init__(self, top_k: int) -> None:
        self._top_k = top_k
        self._held: list[tuple[Generation, int, Tensor, float]] = []

    def hold(self, generation: Generation, position: int, logits: Tensor, refusal: float = 0.0) -> None:
        """Put aside the target's logits [V] before the token at an output position; `refusal` as in `Outcome`."""
        self._held.append((generation, position, logits, refusal))
        if len(self._held) >= HELD:
            self.cut()

    def cut(self) -> None:
        """Give every row that is held to its generation, in the order in which they came."""
        if not self._held:
            return
        held, self._held = self._held, []
        ids, log_probs, tail = top_rows(torch.stack([logits for _, _, logits, _ in held]), self._top_k)
        for j, (generation, position, _, refusal) in enumerate(held):
            generation.teacher.append(TeacherRow(position, ids[j], log_probs[j], float(tail[j]), refusal))
