"""From runs to the row of a table: each figure under the design's word for it, medians over repeats.

A figure that an arm does not have is None: plain decoding proposes nothing, and sampled outputs have no one text
to be held against.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from adapter.acceptance import Acceptance
from benchmarks.run import PlayedRound, Run

OURS = ("speculative", "governed")
DRAFTING = (*OURS, "hf_assisted")  # arms that have a draft length


@dataclass(frozen=True)
class Counts:
    """How outputs compare with plain decoding's."""

    identical: int
    near_ties: int
    different: int


@dataclass(frozen=True)
class Row:
    """One arm under one setting; benchmarks/meanings says what each figure is."""

    arm: str
    workload: str
    k: int
    temperature: float
    batch: int
    requests: int
    repeats: int
    proposed: int
    accepted: int
    rounds: int
    plain_rounds: int
    acceptance_rate: float | None
    acceptance_length: float | None
    acceptance_by_position: tuple[float, ...] | None
    acceptance_probability: float | None
    rejection_positions: tuple[int, ...] | None
    draft_ms: float | None
    verify_ms: float | None
    round_ms: float
    latency_ms: float
    latency_p95_ms: float
    tokens_per_second: float
    accepted_progress: float
    peak_memory_mb: float
    identical: int | None
    near_ties: int | None
    different: int | None
    speed_up: float
    throughput_ratio: float
    ideal_speed_up: float | None
    ratio_to_ideal: float | None
    ratio_to_best: float | None
    verdict: str | None

    @property
    def has_draft_length(self) -> bool:
        return self.arm in DRAFTING


@dataclass(frozen=True)
class Measured:
    """One arm's runs, a repeat each, and what was found out about them."""

    arm: str
    k: int | None
    runs: tuple[Run, ...]
    counts: Counts | None = None

    @property
    def rounds(self) -> list[PlayedRound]:
        return [one for run in self.runs for answer in run.answers for one in answer.rounds]

    @property
    def acceptance(self) -> Acceptance:
        return Acceptance.of([(one.proposed, one.accepted) for one in self.rounds])

    @property
    def progress(self) -> float:
        return self.over(lambda run: run.progress.per_ms)

    @property
    def tokens_per_second(self) -> float:
        return self.over(lambda run: run.tokens_per_second)

    @property
    def round_ms(self) -> float:
        return _median([ms for run in self.runs for ms in run.progress.round_ms])

    @property
    def plain_rounds(self) -> int:
        """Tokens that no round with a proposal committed, but for each request's first, came one a round."""
        tokens = sum(len(answer.tokens) - 1 for run in self.runs for answer in run.answers)
        return max(tokens - sum(one.accepted + 1 for one in self.rounds), 0)

    def over(self, figure: Callable[[Run], float]) -> float:
        return median(figure(run) for run in self.runs)


@dataclass(frozen=True)
class Setting:
    """What all arms of a cell have in common."""

    workload: str
    temperature: float
    batch: int
    requests: int
    acceptance_probability: float


def rows_of(setting: Setting, cell: Sequence[Measured], ks: Sequence[int]) -> list[Row]:
    """The rows of one cell, by k; arms without a draft length stand under every k."""
    return [_row(setting, one, k, cell) for k in ks for one in cell if one.k in (k, None)]


def _row(setting: Setting, measured: Measured, k: int, cell: Sequence[Measured]) -> Row:
    plain = next(one for one in cell if one.arm == "plain")
    acceptance, rounds, speculates = measured.acceptance, measured.rounds, bool(measured.rounds)
    draft_ms = _median([one.draft_ms for one in rounds]) if speculates else None
    verify_ms = _median([one.verify_ms for one in rounds]) if speculates else None
    speed_up = _ratio(measured.progress, plain.progress)
    ideal = _ideal(measured, plain, acceptance.length, draft_ms, verify_ms)
    latencies = [answer.latency_ms for run in measured.runs for answer in run.answers]
    counts = measured.counts
    return Row(
        arm=measured.arm,
        workload=setting.workload,
        k=k,
        temperature=setting.temperature,
        batch=setting.batch,
        requests=setting.requests,
        repeats=len(measured.runs),
        proposed=acceptance.proposed,
        accepted=acceptance.accepted,
        rounds=acceptance.rounds,
        plain_rounds=measured.plain_rounds,
        acceptance_rate=acceptance.rate if speculates else None,
        acceptance_length=acceptance.length if speculates else None,
        acceptance_by_position=acceptance.survival if speculates else None,
        acceptance_probability=setting.acceptance_probability if measured.k else None,
        rejection_positions=rejection_positions(rounds) if speculates else None,
        draft_ms=draft_ms,
        verify_ms=verify_ms,
        round_ms=measured.round_ms,
        latency_ms=_median(latencies),
        latency_p95_ms=float(np.percentile(latencies, 95)),
        tokens_per_second=measured.tokens_per_second,
        accepted_progress=measured.progress,
        peak_memory_mb=max(run.peak_memory_mb for run in measured.runs),
        identical=counts.identical if counts else None,
        near_ties=counts.near_ties if counts else None,
        different=counts.different if counts else None,
        speed_up=speed_up,
        throughput_ratio=_ratio(measured.tokens_per_second, plain.tokens_per_second),
        ideal_speed_up=ideal,
        ratio_to_ideal=_ratio(speed_up, ideal) if ideal else None,
        ratio_to_best=_ratio_to_best(measured, cell),
        verdict=verdict(measured, plain) if measured.arm in OURS else None,
    )


def without_repeats(rows: Sequence[Row]) -> list[Row]:
    """Arms without a draft length only once in each cell: for people that is enough."""
    once: dict[tuple[object, ...], Row] = {}
    for row in rows:
        key = (row.arm, row.workload, row.temperature, row.batch, row.k if row.has_draft_length else 0)
        once.setdefault(key, row)
    return list(once.values())


def rejection_positions(rounds: Sequence[PlayedRound]) -> tuple[int, ...]:
    """How many rounds refused the token at each position, first to last."""
    counts = [0] * max((one.proposed for one in rounds), default=0)
    for one in rounds:
        if one.accepted < one.proposed:
            counts[one.accepted] += 1
    return tuple(counts)


def verdict(measured: Measured, plain: Measured) -> str:
    """Repeats are held against each other in turn: what the machine did meanwhile, it did to both."""
    wins = [
        ours.progress.per_ms > theirs.progress.per_ms for ours, theirs in zip(measured.runs, plain.runs, strict=True)
    ]
    return "on" if all(wins) else "unclear" if any(wins) else "off"


def _ideal(
    measured: Measured, plain: Measured, length: float, draft_ms: float | None, verify_ms: float | None
) -> float | None:
    """What the measured costs and survival promise. The governor mixes draft lengths: it is held against the best."""
    if draft_ms is None or verify_ms is None or measured.arm == "governed":
        return None
    return length * plain.round_ms / (draft_ms + verify_ms)


def _ratio_to_best(measured: Measured, cell: Sequence[Measured]) -> float | None:
    if measured.arm != "governed" or measured.k is None:
        return None
    fixed = [one for one in cell if one.arm == "plain" or (one.arm == "speculative" and (one.k or 0) <= measured.k)]
    return _ratio(measured.progress, max(one.progress for one in fixed))


def _ratio(ours: float, theirs: float) -> float:
    return ours / theirs if theirs else 0.0


def _median(values: Sequence[float]) -> float:
    return float(median(values)) if values else 0.0
