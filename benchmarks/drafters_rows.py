"""From the runs of `redraft bench drafters` to its rows, one for each kind, workload and shape of proposals.

What bounds a kind can be read off a row: `speed_up` is `tokens_per_round` over `round_cost`, the first comes of
`acceptance_by_position`, and of the second the drafter's part is `draft_cost`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.drafters_students import NGRAM, Replayed, Student
from benchmarks.figures import Measured, Row, Setting, rows_of
from benchmarks.meanings import MEANINGS as OF_DECODING

CHAIN, TREE, GOVERNED, COMBINED = "chain", "tree", "governed", "combined"
FREE = (GOVERNED, COMBINED)  # how deep a proposal is, the governor says

MEANINGS = {
    "kind": "of drafter; each has learned the same records of the workload (together: of all workloads)",
    "shape": "chain of k tokens; tree of at most `nodes` tokens, k deep, grown by the drafter's confidence; governed: "
    "the governor chooses among plain decoding, chains and trees up to these; combined: also, up to 15 tokens of what "
    "followed the same tokens before, ahead of the drafter (REDRAFT_NGRAM_FIRST), looked for where ngram does",
    "parameters": "weights of its own, without what it shares with the target",
    "memory_mb": "of these as served; of ngram: of the index that it looks in",
    "position_bytes": "keys and values of its own for each token of a request",
    "acceptance_probability": "share of all positions of unseen answers where the first token that it would propose is "
    "the target's",
    "acceptance_probability_before": "the same of version 1, before it learned",
    "acceptance_length_before": "acceptance length of chains of version 1, by replay of the unseen answers",
    "draft_cost": "proposing one token deeper, in target steps: draft_ms / depth over the round_ms of plain decoding; "
    "null where the governor varies the depth",
    "round_cost": "a whole round in target steps: round_ms over that of plain decoding",
    "tokens_per_round": "committed by a round of a request, rounds without a proposal included",
    "training_records": "that it learned from",
    "training_seconds": "in which it learned; of ngram: in which the outputs were taken in",
    "reading_seconds": "in which the target read the records again for its hidden states; 0 for a kind without",
    "training_seconds_per_thousand": "both, for a thousand records",
    "training_peak_memory_mb": "resident peak of the process while it learned",
}
FROM_DECODING = (
    "requests", "repeats", "proposed", "accepted", "rounds", "plain_rounds", "acceptance_rate", "acceptance_length",
    "acceptance_by_position", "draft_ms", "verify_ms", "round_ms", "latency_ms", "tokens_per_second",
    "accepted_progress", "speed_up", "throughput_ratio", "verdict", "identical", "near_ties", "different",
    "peak_memory_mb",
)  # fmt: skip


@dataclass(frozen=True)
class DrafterRow:
    """One kind on one workload with proposals of one shape; see `MEANINGS`."""

    kind: str
    workload: str
    shape: str
    k: int
    nodes: int  # tokens a round at most
    batch: int
    parameters: int
    memory_mb: float
    position_bytes: int
    acceptance_probability: float
    acceptance_probability_before: float | None  # None: it does not learn
    acceptance_length_before: float | None
    draft_cost: float | None  # None: it never proposed, or the governor varied how deep
    round_cost: float
    tokens_per_round: float
    training_records: int
    training_seconds: float
    reading_seconds: float
    training_seconds_per_thousand: float
    training_peak_memory_mb: float
    requests: int
    repeats: int
    proposed: int
    accepted: int
    rounds: int
    plain_rounds: int
    acceptance_rate: float | None
    acceptance_length: float | None
    acceptance_by_position: tuple[float, ...] | None
    draft_ms: float | None
    verify_ms: float | None
    round_ms: float
    latency_ms: float
    tokens_per_second: float
    accepted_progress: float
    speed_up: float
    throughput_ratio: float
    verdict: str | None
    identical: int | None
    near_ties: int | None
    different: int | None
    peak_memory_mb: float


@dataclass(frozen=True)
class PlainRow:
    """What all kinds of one workload are held against."""

    workload: str
    requests: int
    repeats: int
    round_ms: float
    latency_ms: float
    tokens_per_second: float
    accepted_progress: float
    peak_memory_mb: float


@dataclass(frozen=True)
class Best:
    """The kind and shape with most accepted progress on a workload; `ngram` is the floor that it must beat."""

    workload: str
    kind: str
    shape: str
    speed_up: float
    tokens_per_round: float
    round_cost: float
    ngram_speed_up: float | None  # of its best shape


@dataclass(frozen=True)
class Asked:
    """One arm: who proposes, in which shape, and what it does on the unseen answers."""

    student: Student
    shape: str
    k: int
    nodes: int
    after: Replayed
    before: Replayed | None


def plain_row(workload: str, plain: Measured) -> PlainRow:
    row = _decoded(workload, 1, plain, plain)[0]
    names = PlainRow.__dataclass_fields__.keys() - {"workload"}
    return PlainRow(workload, **{name: getattr(row, name) for name in names})


def drafter_row(workload: str, batch: int, asked: Asked, measured: Measured, plain: Measured) -> DrafterRow:
    row = _decoded(workload, batch, measured, plain)[1]
    student, training, before = asked.student, asked.student.training, asked.before
    return DrafterRow(
        kind=student.kind,
        workload=workload,
        shape=asked.shape,
        k=asked.k,
        nodes=asked.nodes,
        batch=batch,
        parameters=student.parameters,
        memory_mb=student.memory_mb,
        position_bytes=student.position_bytes,
        acceptance_probability=asked.after.probability,
        acceptance_probability_before=before.probability if before else None,
        acceptance_length_before=before.length if before else None,
        draft_cost=_draft_cost(asked, row, plain),
        round_cost=row.round_ms / plain.round_ms if plain.round_ms else 0.0,
        tokens_per_round=_tokens_per_round(row),
        training_records=training.records,
        training_seconds=training.seconds,
        reading_seconds=training.reading_seconds,
        training_seconds_per_thousand=training.seconds_per_thousand,
        training_peak_memory_mb=training.peak_memory_mb,
        **{name: getattr(row, name) for name in FROM_DECODING},
    )


def best_of(rows: Sequence[DrafterRow]) -> list[Best]:
    """By workload."""
    found = []
    for workload in dict.fromkeys(row.workload for row in rows):
        here = [row for row in rows if row.workload == workload]
        best = max(here, key=lambda row: row.accepted_progress)
        floor = max((row.speed_up for row in here if row.kind == NGRAM), default=None)
        found.append(
            Best(workload, best.kind, best.shape, best.speed_up, best.tokens_per_round, best.round_cost, floor)
        )
    return found


def meanings() -> dict[str, str]:
    """Of every column that needs one."""
    return {**{name: OF_DECODING[name] for name in FROM_DECODING if name in OF_DECODING}, **MEANINGS}


def _decoded(workload: str, batch: int, measured: Measured, plain: Measured) -> list[Row]:
    """Plain decoding's row and, where it is another, the arm's."""
    cell = [plain] if measured is plain else [plain, measured]
    setting = Setting(workload, 0.0, batch, len(plain.runs[0].answers), 0.0)
    return rows_of(setting, cell, (measured.k or 1,))


def _draft_cost(asked: Asked, row: Row, plain: Measured) -> float | None:
    if asked.shape in FREE or row.draft_ms is None or not plain.round_ms:
        return None
    drafter = asked.student.drafter
    deepest = min(asked.k, drafter.depths) if drafter.taps else asked.k
    return row.draft_ms / deepest / plain.round_ms


def _tokens_per_round(row: Row) -> float:
    rounds = row.rounds + row.plain_rounds
    return (row.accepted + rounds) / rounds if rounds else 1.0
