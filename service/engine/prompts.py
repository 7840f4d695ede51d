"""Prompts on their way into slots: read in the order in which they came, some tokens between two rounds."""

from collections.abc import Iterator
from time import perf_counter

from torch import Tensor

from adapter.sampling import Sampler
from adapter.target import Target
from service.engine.batch import Batch
from service.engine.generation import Generation, Row
from service.engine.inbox import Inbox
from service.engine.rounds import read_prompt
from service.engine.slots import Slots
from service.engine.text import TextStream


class Prompts:
    """Takes requests from the inbox while slots are free; at most `chunk` tokens are read a time."""

    def __init__(self, target: Target, slots: Slots, batch: Batch, inbox: Inbox, chunk: int) -> None:
        self._target, self._slots, self._batch, self._inbox, self._chunk = target, slots, batch, inbox, chunk

    def read(self) -> Iterator[tuple[Row, Tensor]]:
        """Read on; each row whose prompt has been read to its end, and the logits [1, 1, V] after it."""
        left = self._chunk
        while left > 0 and (row := self._next()) is not None:
            before = row.target_length
            logits = read_prompt(self._target, self._slots, len(self._batch.rows), row, left)
            left -= row.target_length - before
            if logits is not None:
                row.generation.first_token_at = perf_counter()
                self._batch.filled()
                yield row, logits

    def _next(self) -> Row | None:
        """The row whose prompt is being read, or the next request where a slot is free."""
        if self._batch.has_room and (generation := self._inbox.take_request()) is not None:
            self._batch.filling = self._row(generation)
        return self._batch.filling

    def _row(self, generation: Generation) -> Row:
        sampler = Sampler(
            generation.policy,
            generation.prompt_ids,
            generation.output_ids,
            seed=generation.seed,
            constraint=generation.constraint,
        )
        text = TextStream(self._target.tokenizer, generation.stop)
        return Row(generation, text, sampler, list(generation.prompt_ids))
