"""Prompts on their way into slots: read in the order in which they came, some tokens between two rounds."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from time import perf_counter

from torch import Tensor

from adapter.sampling import Sampler
from adapter.target import Target
from service.engine.batch import Batch
from service.engine.following import Reads, Shown, has_taps, reading
from service.engine.generation import Generation, Row
from service.engine.inbox import Inbox
from service.engine.residents import DrafterFailed, Resident
from service.engine.rounds import read_prompt
from service.engine.slots import Slots
from service.engine.text import TextStream


@dataclass(frozen=True)
class Prompt:
    """A prompt that has been read to its end."""

    row: Row
    logits: Tensor  # [1, 1, V] after it
    tell: Callable[[int], None]  # show the drafter that follows the row the last piece, once its first token is known


class Prompts:
    """Takes requests from the inbox while slots are free; at most `chunk` tokens are read a time.

    `drafter_of` gives the drafter of a request, which is shown what is read where it follows the target; `failed` is
    told of one that raises an error.
    """

    def __init__(
        self,
        target: Target,
        slots: Slots,
        batch: Batch,
        inbox: Inbox,
        chunk: int,
        drafter_of: Callable[[Generation], Resident],
        failed: Callable[[DrafterFailed], None],
    ) -> None:
        self._target, self._slots, self._batch, self._inbox, self._chunk = target, slots, batch, inbox, chunk
        self._drafter_of, self._failed = drafter_of, failed

    def read(self) -> Iterator[Prompt]:
        """Read on; each row whose prompt has been read to its end."""
        left = self._chunk
        while left > 0 and (row := self._next()) is not None:
            before, slot, resident = row.target_length, len(self._batch.rows), self._drafter_of(row.generation)
            ends = len(row.sequence) - before <= left
            follows = has_taps(resident) and row.generation.draft_length != 0 and (ends or resident.slots is not None)
            with reading(self._target, self._slots, [resident] if follows else [], last=True) as reads:
                logits = read_prompt(self._target, self._slots, slot, row, left)
            left -= row.target_length - before
            tell = partial(self._tell, reads, resident, row, slot, before) if follows else _nothing
            if logits is None:
                tell(row.sequence[row.target_length])
            else:
                row.generation.first_token_at = perf_counter()
                self._batch.filled()
                yield Prompt(row, logits, tell)

    def _tell(self, reads: Reads, resident: Resident, row: Row, slot: int, start: int, following: int) -> None:
        """Show a piece from `start` on to a drafter that follows; `following` is the token after it.

        One that has no memory of the text is shown the last token alone.
        """
        start = row.target_length - 1 if resident.slots is None else start
        size = row.target_length - start
        after = [*row.sequence[start + 1 : row.target_length], following]
        try:
            reads.tell(resident, [Shown(row, slot, start, list(range(-size, 0)), after)])
        except DrafterFailed as failed:
            self._failed(failed)

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
            typical=generation.typical,
        )
        text = TextStream(self._target.tokenizer, generation.stop)
        return Row(generation, text, sampler, list(generation.prompt_ids))


def _nothing(following: int) -> None:
    """What is told to a drafter that does not follow."""
