"""The whole life of the data on the learning side, in one function: from waiting feedback to a promotion."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import structlog

from adapter import moments
from adapter.distil import DistilConfig, TrainingFailed
from adapter.distributed import Launch
from adapter.gate import GateConfig, decide
from adapter.replay import evaluate
from adapter.versions import Versions
from adapter.watch import WatchConfig
from storage.canary import Canaries
from storage.decisions import ENGINE, Decision
from storage.history import round_costs
from storage.jobs import Lease
from storage.records import FeedbackRecord
from storage.registry import CanaryOut, Drafter, PointerMoved, Quarantined, Registry, Version
from storage.stream import FeedbackStream
from storage.windows import Window, Windows
from worker.collect import Teach, collect
from worker.config import TriggerConfig
from worker.engine_teacher import EngineTeacher
from worker.guards import distinct
from worker.lineage import check_text, chosen, gathered, taught, trained
from worker.rescoring import Rescorer, reread

log = structlog.get_logger()

StillHeld = Callable[[], None]  # raises when the lease is lost; called between training steps


@dataclass(frozen=True)
class AdaptConfig:
    """The settings of one update."""

    trigger: TriggerConfig
    distil: DistilConfig
    gate: GateConfig
    watch: WatchConfig = field(default_factory=WatchConfig)


@dataclass(frozen=True)
class Stores:
    """Where an update reads from and writes to; every write carries the lease's fencing number."""

    stream: FeedbackStream
    windows: Windows
    registry: Registry
    weights: Versions
    lease: Lease
    rescorer: Rescorer | None = None  # None: there is no target that could read records again
    launch: Launch | None = None  # None: one process trains, this one
    engine: EngineTeacher | None = None  # None: no engine is asked to teach


def adapt_once(drafter: Drafter, stores: Stores, config: AdaptConfig, still_held: StillHeld) -> Decision | None:
    """Turn waiting feedback into at most one promotion. Safe to repeat after a crash at any line."""
    window = collect(
        stores.stream, stores.windows, drafter, stores.weights.vocab_size, config.trigger, stores.lease,
        _teaching(stores, still_held),
    )  # fmt: skip
    if window is None:
        return None
    candidate = stores.registry.candidate_of(window.id) or _train(drafter, window, stores, config, still_held)
    if candidate is None:
        return None
    parent = _parent(candidate, stores.registry)
    holdout = _holdout(drafter, stores.windows, config.trigger)
    student, predecessor = (stores.weights.load(version, drafter) for version in (candidate, parent))
    seen = reread(holdout, student.taps, stores.rescorer, still_held)
    k, confidence = config.trigger.draft_length, config.gate.confidence
    evaluation = evaluate(student, predecessor, seen.records, k, confidence, hidden=seen.hidden)
    costs = round_costs(stores.registry.engine, drafter.name, config.trigger.draft_length)
    decision = decide(evaluation, config.gate, costs)
    stores.registry.record(candidate, evaluation, decision)
    if decision.promote:
        decision = _promote(candidate, parent, decision, stores, config.watch)
    stores.windows.close(window, "promoted" if decision.promote else "refused", stores.lease)
    return decision


def _teaching(stores: Stores, still_held: StillHeld) -> Teach:
    """What gives a window's records their rows: the engine that teaches, or what serving logged."""
    engine = stores.engine
    if engine is None:
        return lambda records: records
    return lambda records: engine.read(records, stores.weights.vocab_size, still_held)


def _train(
    drafter: Drafter, window: Window, stores: Stores, config: AdaptConfig, still_held: StillHeld
) -> Version | None:
    """A new candidate from the live version and the window; None where training failed, and why is kept."""
    parent = stores.registry.live(drafter.name)
    names = chosen(parent, window, stores.windows, stores.registry, config.distil)
    inputs = gathered(names, drafter, parent, stores.windows, stores.weights)
    if stores.engine is not None:
        inputs = replace(inputs, teacher=ENGINE)  # its rows are in the window
    inputs = taught(inputs, config.distil, stores.rescorer, still_held)
    try:
        check_text(inputs, config.distil)
        made = trained(inputs, config.distil, still_held, stores.launch)
    except TrainingFailed as failure:
        log.warning("training.failed", drafter=drafter.name, window=window.id, reason=str(failure))
        stores.registry.record_training_failure(parent, window.id, failure.report)
        stores.windows.close(window, "failed", stores.lease)
        return None
    blob, report = stores.weights.save(made.student), made.report
    if config.distil.carry_moments:
        kept = stores.windows.blobs.put(moments.to_bytes(made.moments))
        report = replace(report, moments_sha256=kept.sha256)
    return stores.registry.add_candidate(parent, blob.sha256, blob.size, window.id, report)


def _promote(candidate: Version, parent: Version, decision: Decision, stores: Stores, watch: WatchConfig) -> Decision:
    """Move the live pointer, or send the candidate out as a canary, which the watch promotes or recalls.

    A crash after the move brings us here again, perhaps after an operator's rollback.
    """
    if _taken_back(candidate, stores.registry):
        return Decision(promote=False, reason=f"not promoted: version {candidate.number} was rolled back meanwhile")
    registry, reason = stores.registry, decision.reason
    try:
        if watch.canary > 0:
            Canaries(registry.engine, registry.lease).send_out(candidate, parent, watch.canary, "worker", reason)
        else:
            registry.promote(candidate, expecting=parent, actor="worker", reason=reason, holdback=watch.holdback)
    except (PointerMoved, Quarantined, CanaryOut) as moved:
        log.info("candidate.superseded", version=candidate.number, reason=str(moved))
        return Decision(promote=False, reason=f"not promoted: {moved}")
    log.info("candidate.sent_out" if watch.canary else "candidate.promoted", version=candidate.number)
    return decision


def _taken_back(candidate: Version, registry: Registry) -> bool:
    states = {s.version.id: s.state for s in registry.versions(candidate.drafter)}
    return states[candidate.id] in ("rolled_back", "quarantined")


def _parent(candidate: Version, registry: Registry) -> Version:
    assert candidate.parent is not None, "a candidate has a parent"
    return registry.version(candidate.drafter, candidate.parent)


def _holdout(drafter: Drafter, windows: Windows, config: TriggerConfig) -> list[FeedbackRecord]:
    """Of recent windows, oldest first; what was asked again and again is no more evidence than a few copies of it."""
    recent = reversed(windows.recent(drafter.name, config.holdout_windows))
    return distinct((record for w in recent for record in windows.records(w).holdout), config.window_copies)
