"""An engine's sums as rows of the acceptance history, where its answers carry no rounds."""

from datetime import UTC, datetime
from typing import Final

from service.hosts.sidecar.counters import Growth
from service.hosts.sidecar.reading import Totals
from storage.history import AcceptanceRow
from storage.records import LOSSY, FeedbackRecord

ALL: Final = "all"  # the workload and the policy of figures that tell no requests apart


def row_of(version: int, grown: Growth, lossless: bool, now: datetime | None = None) -> AcceptanceRow:
    """The sums of a stretch of time. They say nothing of requests, workloads, policies or times."""
    moment = now or datetime.now(UTC)
    accepted, rounds = round(grown.accepted), round(grown.drafts)
    return AcceptanceRow(
        version=version,
        workload=ALL,
        policy=ALL if lossless else ALL + LOSSY,
        k=grown.k,
        bucket=moment.replace(second=0, microsecond=0),
        requests=0,
        rounds=rounds,
        proposed=round(grown.proposed),
        accepted=accepted,
        histogram=_padded(grown.histogram, grown.k),
        draft_ms=0.0,
        verify_ms=0.0,
        total_ms=0.0,
        output_tokens=accepted + rounds,
    )


def row_of_totals(record: FeedbackRecord, version: int | None, totals: Totals) -> AcceptanceRow:
    """One request's sums, where its engine tells no more of its rounds."""
    proposed = -(-totals.proposed // totals.rounds) if totals.rounds else 0
    k = max(len(totals.histogram) - 1, proposed)
    return AcceptanceRow(
        version=version or 0,
        workload=record.workload,
        policy=record.policy,
        k=k,
        bucket=datetime.fromtimestamp(record.finished_at, UTC).replace(second=0, microsecond=0),
        requests=1,
        rounds=totals.rounds,
        proposed=totals.proposed,
        accepted=totals.accepted,
        histogram=_padded(totals.histogram, k),
        draft_ms=0.0,
        verify_ms=0.0,
        total_ms=record.total_ms,
        output_tokens=len(record.output),
    )


def _padded(histogram: tuple[int, ...], k: int) -> tuple[int, ...]:
    """Of length k + 1, as every row's."""
    return histogram + (0,) * (k + 1 - len(histogram))
