"""How many tokens to propose in a step: the reference server's governor, told what it can see from inside vLLM.

A round here is a proposal and vLLM's step that verifies it. Its cost is known where the rows are the same before and
after: no prompt was read in between, and nothing waited. Other steps say nothing of a round's cost.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

from service.engine.floor import Proposed
from service.engine.governor import Governor, GovernorConfig, Played
from service.engine.shapes import Shapes
from service.engine.survival import RowClass
from service.hosts.vllm.requests import Request


@dataclass(frozen=True)
class Open:
    """A step's proposals, on their way to being verified."""

    rows: tuple[str, ...]
    classes: tuple[RowClass, ...]
    width: int
    draft_ms: float
    absorbed: int
    at: float


class Pace:
    """Asked before each step's proposals, and told after them, and again when they were verified."""

    def __init__(self, limit: int, config: GovernorConfig) -> None:
        self._limit = limit
        self.governor = Governor(Shapes(limit), config)
        self._open: Open | None = None

    def verified(self, requests: Sequence[Request | None], played: Sequence[Proposed], all_rows: bool) -> None:
        """The next step's rows, and what became of the proposals; `all_rows`: none of them is still reading."""
        before, self._open = self._open, None
        rows = tuple(request.generation.request_id for request in requests if request is not None)
        if before is None or not all_rows or rows != before.rows:
            return
        found = {each.request_id: (each.proposed, each.accepted) for each in played}
        self.governor.observe(
            Played(
                batch=len(rows),
                width=before.width,
                draft_ms=before.draft_ms,
                verify_ms=(perf_counter() - before.at) * 1e3,
                other_ms=0.0,
                absorbed=before.absorbed,
                sampled=any(row.policy != "greedy" for row in before.classes),
                rows=tuple((of, *found.get(row, (0, 0))) for row, of in zip(rows, before.classes, strict=True)),
            )
        )

    def choose(self, requests: Sequence[Request | None]) -> int:
        """The most that is proposed for any row; all of it where a row is not known."""
        classes = [request.row_class for request in requests if request is not None]
        return self.governor.choose(classes) if classes and len(classes) == len(requests) else self._limit

    def proposed(self, requests: Sequence[Request | None], width: int, draft_ms: float, absorbed: int) -> None:
        """What was proposed goes to vLLM now."""
        known = [request for request in requests if request is not None]
        if known and len(known) == len(requests):
            rows = tuple(request.generation.request_id for request in known)
            classes = tuple(request.row_class for request in known)
            self._open = Open(rows, classes, width, draft_ms, absorbed, perf_counter())

    def rearm(self) -> None:
        """Another version proposes."""
        self.governor.rearm()
