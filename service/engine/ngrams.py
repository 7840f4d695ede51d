"""N-gram proposals in the engine: a drafter without weights, and the recent outputs that it looks in.

Its rounds are recorded under version 0. Outputs are taken in by a thread of their own as requests finish, so that no
round waits for it; where they come faster, some are left out.
"""

from queue import Full, Queue
from threading import Thread
from typing import Literal

import torch

from adapter.drafters.ngram import Ngram
from adapter.drafters.protocol import DraftRow
from adapter.drafters.recent import Recent
from service.engine.generation import Generation, Row
from service.engine.lookups import Match, match_of
from service.engine.residents import Resident, blamed

Fallback = Literal["none", "ngram"]

WAITING = 64  # outputs that wait to be taken in; further ones are left out


class Ngrams:
    """One for all lanes."""

    def __init__(self, drafter: Ngram, recent: Recent | None) -> None:
        """What finishes is taken into `recent`; None: `drafter` looks where it does, and nothing is added."""
        self.recent, self._drafter = recent, drafter
        self.resident = Resident(0, drafter)
        self._waiting: Queue[tuple[str, list[int]] | None] = Queue(WAITING)
        self._thread: Thread | None = None
        self.left_out = 0

    @staticmethod
    def of(vocab_size: int, device: torch.device, tokens: int) -> "Ngrams":
        """Over so many tokens of recent outputs, apart by workload; with 0 a row has but its own text."""
        recent = Recent(tokens, vocab_size) if tokens > 0 else None
        return Ngrams(Ngram(vocab_size, device, recent), recent)

    def match(self, row: Row) -> Match:
        """How long the longest match of a row's last tokens is."""
        with blamed(self.resident):
            found = self._drafter.found(
                DraftRow(row.sequence, 0, 1, row.sampler, workload=row.generation.workload), depth=1
            )
        return match_of(found[0].matched if found else 0)

    def finished(self, generation: Generation) -> None:
        """Take in an output, off the engine's thread."""
        if self.recent is None:
            return
        try:
            self._waiting.put_nowait((generation.workload, list(generation.output_ids)))
        except Full:
            self.left_out += 1
        if self._thread is None:
            self._thread = Thread(target=self._take_in, name="ngrams", daemon=True)
            self._thread.start()

    def drain(self) -> None:
        """Wait until what has finished is taken in."""
        self._waiting.join()

    def stop(self) -> None:
        """Take in what waits, and end the thread."""
        if self._thread is not None:
            self._waiting.put(None)
            self._thread = None

    def _take_in(self) -> None:
        assert self.recent is not None, "nothing is taken in without a place for it"
        while (output := self._waiting.get()) is not None:
            self.recent.insert(*output)
            self._waiting.task_done()
