"""Where a version comes from and how it was judged: training runs and evaluations as rows.

The registry calls these inside its transactions. Numbers that are not finite (a failed run's) become null.
"""

from dataclasses import asdict
from math import isfinite
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from storage.database import now
from storage.decisions import LOGGED, Decision, Evaluation, TrainingInputs, TrainingReport, WorkloadScore
from storage.tables import EvaluationRow, MarkRow, TrainingRow, WindowRow


class LineageChanged(RuntimeError):
    """What a run learnt from was purged while it ran: nothing of the run is kept, and the next starts afresh."""


def add_training(
    session: Session, parent_id: int, window_id: int, version_id: int | None, report: TrainingReport
) -> None:
    """One run; `version_id` is None for a run that made no version."""
    session.add(
        TrainingRow(
            parent_id=parent_id,
            window_id=window_id,
            version_id=version_id,
            seed=report.seed,
            config=report.config,
            inputs=asdict(report.inputs) if report.inputs else None,
            machine=report.machine or None,
            records=report.records,
            positions=report.positions,
            steps=report.steps,
            passes=report.passes,
            replayed=report.replayed,
            first_loss=_finite(report.first_loss),
            last_loss=_finite(report.last_loss),
            set_aside_losses=list(report.set_aside_losses),
            novelty=report.novelty,
            mass_covered=report.mass_covered,
            tokens_covered=report.tokens_covered,
            moments_sha256=report.moments_sha256 or None,
            teacher=report.teacher,
            seconds=report.seconds,
            outcome=report.outcome,
            reason=report.reason,
            created_at=now(session),
        )
    )


def check_unchanged(session: Session, parent_id: int, inputs: TrainingInputs | None) -> None:
    """Raise `LineageChanged` where the parent was withdrawn, or a window is not what the run read.

    The caller holds the drafter's lock, which a purge takes as well.
    """
    if session.get(MarkRow, (parent_id, "withdrawn")) is not None:
        raise LineageChanged("the parent was withdrawn while it was trained on: the run is dropped")
    for window_id, digest in inputs.windows if inputs else ():
        if session.scalar(select(WindowRow.sha256).where(WindowRow.id == window_id)) != digest:
            raise LineageChanged(f"window {window_id} was purged while it was trained on: the run is dropped")


def add_evaluation(
    session: Session, candidate_id: int, parent_id: int, evaluation: Evaluation, decision: Decision
) -> None:
    """One evaluation a candidate: a second one, after a crash, changes nothing."""
    if session.scalar(select(EvaluationRow.id).where(EvaluationRow.candidate_id == candidate_id)) is not None:
        return
    session.add(
        EvaluationRow(
            candidate_id=candidate_id,
            parent_id=parent_id,
            k=evaluation.k,
            requests=evaluation.requests,
            scores=[_plain(score) for score in evaluation.scores],
            overall=_plain(evaluation.overall),
            promote=decision.promote,
            reason=decision.reason,
            created_at=now(session),
        )
    )


def training_report(row: TrainingRow) -> TrainingReport:
    """The run as it was reported; losses that were not finite come back as not-a-number."""
    return TrainingReport(
        seed=row.seed,
        config=row.config,
        records=row.records,
        positions=row.positions,
        steps=row.steps,
        first_loss=_number(row.first_loss),
        last_loss=_number(row.last_loss),
        seconds=row.seconds,
        outcome=row.outcome,
        reason=row.reason,
        inputs=_inputs(row.inputs) if row.inputs else None,
        machine=row.machine or {},
        replayed=row.replayed or 0,
        passes=row.passes or 0,
        set_aside_losses=tuple(row.set_aside_losses or ()),
        novelty=row.novelty,
        mass_covered=row.mass_covered,
        tokens_covered=row.tokens_covered,
        moments_sha256=row.moments_sha256 or "",
        teacher=row.teacher or LOGGED,
    )


def evaluation_report(row: EvaluationRow) -> Evaluation:
    scores = tuple(_score(score) for score in row.scores)
    return Evaluation(row.k, row.requests, scores, _score(row.overall))


def _inputs(plain: dict[str, Any]) -> TrainingInputs:
    windows = tuple((int(window_id), str(digest)) for window_id, digest in plain["windows"])
    return TrainingInputs(**{**plain, "windows": windows, "replayed": tuple(plain.get("replayed", ()))})


def _finite(value: float) -> float | None:
    return value if isfinite(value) else None


def _number(value: float | None) -> float:
    return float("nan") if value is None else value


def _plain(score: WorkloadScore) -> dict[str, Any]:
    return {name: _finite(v) if isinstance(v, float) else v for name, v in asdict(score).items()}


def _score(plain: dict[str, Any]) -> WorkloadScore:
    values: dict[str, Any] = {name: _number(v) if v is None else v for name, v in plain.items()}
    return WorkloadScore(**values)
