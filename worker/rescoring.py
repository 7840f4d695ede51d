"""Re-scoring in the trainer: the target comes into memory when there are records to read again, and goes afterwards."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import structlog
from torch import Tensor

from adapter.batch import Positions
from adapter.rescore import WHOLE, Pace, RescoreConfig, rescore
from adapter.target import Target, TargetConfig, TargetFiles, dtype_name, load
from storage.decisions import RESCORED
from storage.records import FeedbackRecord

log = structlog.get_logger()

Load = Callable[[str], Target]  # with the numbers held as named; "auto": as the settings say


@dataclass(frozen=True)
class Read:
    """Records as the target reads them now; what it may not read is as it was."""

    records: list[FeedbackRecord]
    hidden: dict[str, Tensor] = field(default_factory=dict)  # by record_id: [n, F]; empty without taps


class Rescorer:
    """Reads records again for one trainer. What it costs and whether it is asked for is in its settings."""

    def __init__(self, load: Load, config: RescoreConfig, dtype: str = "auto") -> None:
        self._load, self.config, self._dtype = load, config, dtype
        self._target: Target | None = None

    @staticmethod
    def again(load: Load, how: dict[str, Any]) -> "Rescorer":
        """One that reads as a run's row says that it read, and as fast as it can."""
        config = RescoreConfig(
            teacher="rescored", rescore_tokens=how["tokens"], rescore_top_k=how["top_k"], rescore_share=1.0
        )
        return Rescorer(load, config, how["dtype"])

    def is_needed(self, taps: tuple[int, ...]) -> bool:
        """For a drafter with these taps: one that has any cannot learn otherwise."""
        return bool(taps) or self.config.teacher == RESCORED

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Keep the target in memory, once it was needed, until the end of the block."""
        try:
            yield
        finally:
            self._target = None

    def how(self) -> dict[str, Any]:
        """What the rows depend on beside the records, as a run's row keeps it."""
        config, dtype = self.config, dtype_name(self._loaded().dtype)
        return {"tokens": config.rescore_tokens, "top_k": config.rescore_top_k, "dtype": dtype}

    def read(
        self,
        records: Sequence[FeedbackRecord],
        taps: tuple[int, ...],
        rows: Positions = "verified",
        max_context: int = WHOLE,
        should_stop: Callable[[], None] = lambda: None,
    ) -> Read:
        """All `records`, in their order. `should_stop` is called after each of them, and ends it by raising."""
        target, config = self._loaded(), self.config
        by_id: dict[str, FeedbackRecord] = {}
        hidden: dict[str, Tensor] = {}
        for found in rescore(
            target, records, taps, config.rescore_top_k, rows,
            max_context=max_context, batch_tokens=config.rescore_tokens, pace=Pace(config.rescore_share),
        ):  # fmt: skip
            should_stop()
            by_id[found.record.record_id] = found.record
            if found.hidden is not None:
                hidden[found.record.record_id] = found.hidden
        log.info("records.rescored", records=len(by_id), left_out=len(records) - len(by_id))
        return Read([by_id.get(record.record_id, record) for record in records], hidden)

    def _loaded(self) -> Target:
        if self._target is None:
            self._target = self._load(self._dtype)
            log.info("target.loaded", target=self._target.files.name, dtype=str(self._target.dtype))
        return self._target


def reread(
    holdout: Sequence[FeedbackRecord], taps: tuple[int, ...], rescorer: Rescorer | None, should_stop: Callable[[], None]
) -> Read:
    """The holdout as the gate should see it: sampled requests with a row everywhere, or with hidden states.

    Greedy requests need no row, as their text says what the target would choose.
    """
    if rescorer is None or not rescorer.is_needed(taps):
        return Read(list(holdout))
    needed = [record for record in holdout if taps or not record.greedy]
    if not needed:
        return Read(list(holdout))
    found = rescorer.read(needed, taps, should_stop=should_stop)
    by_id = {record.record_id: record for record in found.records}
    return Read([by_id.get(record.record_id, record) for record in holdout], found.hidden)


def loading(config: TargetConfig, files: TargetFiles) -> Load:
    """Loads the target of these settings, whose files were found already."""
    return lambda dtype: load(config if dtype == "auto" else replace(config, dtype=dtype), files)
