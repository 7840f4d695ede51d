"""The whole life of the data on the learning side, in one function: from waiting feedback to a promotion."""

from collections.abc import Callable
from dataclasses import dataclass

import structlog

from adapter.distil import DistilConfig, TrainingFailed, distil
from adapter.gate import GateConfig, decide
from adapter.replay import evaluate
from adapter.versions import Versions
from storage.decisions import Decision
from storage.jobs import Lease
from storage.records import FeedbackRecord
from storage.registry import Drafter, PointerMoved, Registry, Version
from storage.stream import FeedbackStream
from storage.windows import Window, Windows
from worker.collect import collect
from worker.config import TriggerConfig

log = structlog.get_logger()

StillHeld = Callable[[], None]  # raises when the lease is lost; called between training steps


@dataclass(frozen=True)
class AdaptConfig:
    """The settings of one update."""

    trigger: TriggerConfig
    distil: DistilConfig
    gate: GateConfig


@dataclass(frozen=True)
class Stores:
    """Where an update reads from and writes to; every write carries the lease's fencing number."""

    stream: FeedbackStream
    windows: Windows
    registry: Registry
    weights: Versions
    lease: Lease


def adapt_once(drafter: Drafter, stores: Stores, config: AdaptConfig, still_held: StillHeld) -> Decision | None:
    """Turn waiting feedback into at most one promotion. Safe to repeat after a crash at any line."""
    window = collect(stores.stream, stores.windows, drafter, stores.weights.vocab_size, config.trigger, stores.lease)
    if window is None:
        return None
    candidate = stores.registry.candidate_of(window.id) or _train(drafter, window, stores, config, still_held)
    if candidate is None:
        return None
    parent = _parent(candidate, stores.registry)
    holdout = _holdout(drafter, stores.windows, config.trigger.holdout_windows)
    student, predecessor = (stores.weights.load(version, drafter) for version in (candidate, parent))
    evaluation = evaluate(student, predecessor, holdout, config.trigger.draft_length, config.gate.confidence)
    decision = decide(evaluation, config.gate)
    stores.registry.record(candidate, evaluation, decision)
    if decision.promote:
        decision = _promote(candidate, parent, decision, stores)
    stores.windows.close(window, "promoted" if decision.promote else "refused", stores.lease)
    return decision


def _train(
    drafter: Drafter, window: Window, stores: Stores, config: AdaptConfig, still_held: StillHeld
) -> Version | None:
    """A new candidate from the live version and the window; None where training failed, and why is kept."""
    parent = stores.registry.live(drafter.name)
    training = _training(drafter, window, stores.windows, config.distil.replay_windows)
    try:
        student, report = distil(stores.weights.load(parent, drafter), training, config.distil, still_held)
    except TrainingFailed as failure:
        log.warning("training.failed", drafter=drafter.name, window=window.id, reason=str(failure))
        stores.registry.record_training_failure(parent, window.id, failure.report)
        stores.windows.close(window, "failed", stores.lease)
        return None
    blob = stores.weights.save(student)
    return stores.registry.add_candidate(parent, blob.sha256, blob.size, window.id, report)


def _promote(candidate: Version, parent: Version, decision: Decision, stores: Stores) -> Decision:
    """Move the live pointer. A crash after the move brings us here again, perhaps after an operator's rollback."""
    if _taken_back(candidate, stores.registry):
        return Decision(promote=False, reason=f"not promoted: version {candidate.number} was rolled back meanwhile")
    try:
        stores.registry.promote(candidate, expecting=parent, actor="worker", reason=decision.reason)
    except PointerMoved as moved:
        log.info("candidate.superseded", version=candidate.number, reason=str(moved))
        return Decision(promote=False, reason=f"not promoted: {moved}")
    log.info("candidate.promoted", version=candidate.number, parent=parent.number)
    return decision


def _taken_back(candidate: Version, registry: Registry) -> bool:
    states = {s.version.id: s.state for s in registry.versions(candidate.drafter)}
    return states[candidate.id] == "rolled_back"


def _parent(candidate: Version, registry: Registry) -> Version:
    assert candidate.parent is not None, "a candidate has a parent"
    return registry.version(candidate.drafter, candidate.parent)


def _training(drafter: Drafter, window: Window, windows: Windows, earlier: int) -> list[FeedbackRecord]:
    """The window's training part, after that of some earlier windows, oldest first, so that less is forgotten."""
    past = [w for w in windows.recent(drafter.name, earlier + 1) if w.id < window.id][:earlier]
    return [record for w in [*reversed(past), window] for record in windows.records(w).training]


def _holdout(drafter: Drafter, windows: Windows, count: int) -> list[FeedbackRecord]:
    return [record for w in reversed(windows.recent(drafter.name, count)) for record in windows.records(w).holdout]
