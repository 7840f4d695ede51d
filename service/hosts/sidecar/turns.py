"""Which requests are observed: a share of them, some in a row.

An engine that is asked for one row's log-probabilities works them out for all rows of its batch, step by step (vLLM's
sampler does). So requests that run at the same time are observed at the same time: as many in a row as are under way,
once in as many as the share wants, at a place among them that is drawn. Each request is as likely as any other.
"""

from random import Random
from typing import Final

MOST: Final = 64  # in a row


class Turns:
    """Not thread-safe: requests come in on one thread."""

    def __init__(self, share: float, random: Random | None = None) -> None:
        self._share, self._random = share, random or Random()
        self._before = self._row = self._after = 0  # requests that are still to come of this cycle

    def takes(self, under_way: int) -> bool:
        """Whether the next request is observed; `under_way` are those that have not ended yet, itself among them."""
        if self._share <= 0:
            return False
        if not self._before + self._row + self._after:
            self._begin(min(max(under_way, 1), MOST))
        if self._before:
            self._before -= 1
        elif self._row:
            self._row -= 1
            return True
        else:
            self._after -= 1
        return False

    def _begin(self, row: int) -> None:
        others = row * (1 - self._share) / self._share
        whole = int(others) + (self._random.random() < others % 1)
        self._row, self._before = row, self._random.randint(0, whole)
        self._after = whole - self._before
