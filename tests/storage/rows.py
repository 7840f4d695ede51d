"""What storage's tests put into the database: a drafter, windows, candidates, feedback records."""

import msgspec

from storage.decisions import Decision, Evaluation, TrainingReport, WorkloadScore
from storage.records import SCHEMA_VERSION, FeedbackRecord, Round, TeacherRows, int32
from storage.registry import Registry, Version
from storage.weights import WeightsStore
from storage.windows import Windows

DIGEST = "ab" * 32
MINUTE = 1_800_000_000.0  # seconds since the epoch; the start of a minute


def make_drafter(registry: Registry, name: str = "chat", target: str = "target-1") -> Version:
    return registry.create_drafter(name, "causal_lm", target, "tokenizer-1", {"layers": 2}, DIGEST, 100, "test")


def make_candidate(
    registry: Registry, store: WeightsStore, parent: Version, name: str, tenant: str = "acme"
) -> Version:
    """A candidate of `parent` from a closed window of one record called `name`."""
    windows = Windows(registry.engine, store)
    record = msgspec.structs.replace(make_record(name), tenant=tenant)
    window = windows.keep(parent.drafter, (record,), ())
    assert window is not None
    windows.close(window, "promoted")
    return registry.add_candidate(parent, DIGEST, 100, window.id, make_training())


def make_training(outcome: str = "trained", last_loss: float = 1.0, reason: str = "") -> TrainingReport:
    return TrainingReport(
        7, {"lr": 0.001}, 3, 40, 5, 2.0, last_loss, 0.5, outcome, reason, replayed=2, passes=2,
        set_aside_losses=(2.5, 1.25, 1.5), novelty=1.5, mass_covered=0.875, tokens_covered=0.75,
        teacher="rescored",
    )  # fmt: skip


def make_evaluation(gain: float = 0.1) -> Evaluation:
    score = WorkloadScore("code", "greedy", 12, 300, 0.2, 0.2 + gain, 1.2, 1.3, gain, gain - 0.05, gain + 0.05)
    return Evaluation(4, 12, (score,), score)


def make_decision(promote: bool, reason: str = "as the test says") -> Decision:
    return Decision(promote, reason)


def make_round(version: int, proposed: int, accepted: int) -> Round:
    return Round(0, version, proposed, accepted, -1, 1.0, 2.0, 10.0)


def make_record(
    record_id: str,
    rounds: tuple[Round, ...] = (),
    tokens: int = 8,
    finished_at: float = MINUTE,
    drafter: str = "chat",
    total_ms: float = 100.0,
) -> FeedbackRecord:
    return FeedbackRecord(
        schema_version=SCHEMA_VERSION,
        record_id=record_id,
        request_id=f"request-{record_id}",
        finished_at=finished_at,
        tenant="acme",
        workload="code",
        source="reference",
        target_fingerprint="target-1",
        tokenizer_fingerprint="tokenizer-1",
        drafter=drafter,
        temperature=0.0,
        top_p=1.0,
        top_k=0,
        structured=False,
        lossless=True,
        train=True,
        prompt_ids=int32([1, 2, 3]),
        output_ids=int32(list(range(tokens))),
        finish_reason="stop",
        rounds=rounds,
        teacher=TeacherRows(1, b"", b"", b"", b""),
        time_to_first_token_ms=20.0,
        total_ms=total_ms,
        resident_mb=500.0,
    )
