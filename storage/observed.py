"""What the watch after a promotion, or over a canary, knows of one request, as a plain frozen record."""

from dataclasses import dataclass

from storage.records import FeedbackRecord
from storage.shares import share_of


@dataclass(frozen=True)
class Observation:
    """A request with proposals. `held` is what its id's hash said, not what happened: see `strayed`."""

    workload: str
    policy: str
    held: bool  # meant for the predecessor: held back from a promoted version, or none of a canary's
    strayed: bool  # most of its rounds were another version's than meant
    proposed: int
    accepted: int
    tokens: int  # committed by rounds with a proposal
    ms: float  # of those rounds


def observed(record: FeedbackRecord, share: float, live: int, predecessor: int) -> Observation | None:
    """A record seen by a watch; None where nothing was proposed, or by other versions altogether, or verified lossily.

    `share` is the predecessor's; `live` is the version that is watched, be it live or a canary.
    """
    rounds = [r for r in record.rounds if r.version in (live, predecessor)]
    proposed = sum(r.proposed for r in rounds)
    if not proposed or not record.lossless:
        return None
    held = share_of(record.request_id) < share
    meant = predecessor if held else live
    return Observation(
        workload=record.workload,
        policy=record.policy,
        held=held,
        strayed=2 * sum(r.version == meant for r in rounds) < len(rounds),
        proposed=proposed,
        accepted=sum(r.accepted for r in rounds),
        tokens=sum(r.accepted + 1 for r in rounds),
        ms=sum(r.draft_ms + r.verify_ms for r in rounds),
    )
