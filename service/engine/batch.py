"""The rows that hold slots: those that decode fill the first ones, and behind them stands the one that is read in.

A row's place in the batch is its slot. When one leaves, the last row moves into the hole, so that a forward
over the batch works on views.
"""

from collections.abc import Callable

from service.engine.generation import Row


class Batch:
    """At most `count` rows; `move(source, destination)` copies one slot over another in every memory."""

    def __init__(self, count: int, move: Callable[[int, int], None]) -> None:
        self._count, self._move = count, move
        self.rows: list[Row] = []  # decoding
        self.filling: Row | None = None  # its prompt is being read, in slot len(rows)

    def __len__(self) -> int:
        return len(self.all)

    @property
    def all(self) -> list[Row]:
        return [*self.rows, *([] if self.filling is None else [self.filling])]

    @property
    def has_room(self) -> bool:
        """Whether another row's prompt may be read in."""
        return self.filling is None and len(self.rows) < self._count

    def filled(self) -> None:
        """The prompt has been read: the row decodes from now on."""
        assert self.filling is not None, "no prompt is being read"
        self.rows.append(self.filling)
        self.filling = None

    def leave(self, row: Row) -> None:
        """Free a row's slot."""
        if row is self.filling:
            self.filling = None
            return
        hole, end = self.rows.index(row), len(self.rows) - 1
        if hole != end:
            self._move(end, hole)
            self.rows[hole] = self.rows[end]
        self.rows.pop()
        if self.filling is not None:
            self._move(end + 1, end)

    def clear(self) -> list[Row]:
        """Free every slot; the rows that held them."""
        rows = self.all
        self.rows, self.filling = [], None
        return rows
