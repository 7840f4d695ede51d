"""Plain decoding, the first version and the last one, side by side on prompts that neither has seen.

The arms run in turn on the same server, with the same prompts and settings, and their requests are not
trained on. The acceptance probability comes from a replay of the plain outputs, every position counted; where
the drafter is conditioned on the target's hidden states, the target reads those outputs again for it.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from adapter.replay import matches
from adapter.rescore import hidden_states
from adapter.target import Target
from adapter.versions import Versions
from cli.demo.prompts import Workload
from cli.demo.traffic import Answer, Clients, Failure
from service.engine.audit import compare
from storage.records import FeedbackRecord, TeacherRows, int32
from storage.registry import Drafter, Version

NOT_TRAINED_ON = {"X-Redraft-Train": "no"}


class ComparisonFailed(RuntimeError):
    """A request of the comparison failed, so that its figures would mean nothing."""


@dataclass(frozen=True)
class Arm:
    """One arm's figures; a plain arm proposes nothing, so it has no acceptance."""

    arm: str  # plain, first, last, governed
    version: int | None
    k: int  # at most, where governed
    acceptance_probability: float | None
    acceptance_rate: float | None
    acceptance_length: float | None
    tokens_per_second: float
    identical: int
    near_ties: int
    prompts: int


def measure(clients: Clients, parts: Sequence[Workload], draft_length: int | None) -> tuple[list[Answer], float]:
    """Answers to the workloads' unseen prompts, and tokens per second over all of them.

    At one draft length, or at the governor's choice (None).
    """
    headers = NOT_TRAINED_ON | ({} if draft_length is None else fixed(draft_length))
    began, found = time.perf_counter(), []
    for part in parts:
        results = clients.send(part.name, part.unseen, headers)
        failed = [result for result in results if isinstance(result, Failure)]
        if failed:
            raise ComparisonFailed(f"{len(failed)} requests of the comparison failed; the first: {failed[0].error}")
        found += [result for result in results if isinstance(result, Answer)]
    return found, sum(len(a.token_ids) for a in found) / (time.perf_counter() - began)


def fixed(draft_length: int) -> dict[str, str]:
    """The header that takes the choice of the draft length from the governor."""
    return {"X-Redraft-Draft-Length": str(draft_length)}


def plain_arm(found: list[Answer], speed: float) -> Arm:
    return Arm("plain", None, 0, None, None, None, speed, len(found), 0, len(found))


def speculative_arm(
    name: str, version: Version, k: int, found: list[Answer], speed: float, plain: list[Answer], judge: "Judge"
) -> Arm:
    """The figures of a version's answers, held against the plain ones."""
    verdicts = [
        compare(judge.target, ours.prompt_ids, theirs.token_ids, ours.token_ids).verdict
        for ours, theirs in zip(found, plain, strict=True)
    ]
    proposed, rounds = sum(a.proposed for a in found), sum(a.rounds for a in found)
    accepted = sum(a.accepted for a in found)
    return Arm(
        arm=name,
        version=version.number,
        k=k,
        acceptance_probability=judge.probability(version, plain),
        acceptance_rate=accepted / max(1, proposed),
        acceptance_length=1 + accepted / max(1, rounds),
        tokens_per_second=speed,
        identical=verdicts.count("identical"),
        near_ties=verdicts.count("near_tie"),
        prompts=len(found),
    )


class Judge:
    """Replays versions over plain outputs."""

    def __init__(self, target: Target, versions: Versions, drafter: Drafter) -> None:
        self.target, self._versions, self._drafter = target, versions, drafter

    def probability(self, version: Version, plain: Sequence[Answer]) -> float:
        """At temperature 0: the share of output positions where the version's choice is the target's."""
        loaded = self._versions.load(version, self._drafter)
        records = [self._record(f"{i}", answer) for i, answer in enumerate(plain) if len(answer.token_ids) > 1]
        hidden = hidden_states(self.target, records, loaded.taps)
        agreed = [matches(loaded, record, hidden.get(record.record_id))[1:] for record in records]
        return float(np.concatenate(agreed).mean())

    def _record(self, name: str, answer: Answer) -> FeedbackRecord:
        return FeedbackRecord(
            schema_version=1,
            record_id=name,
            request_id=name,
            finished_at=time.time(),
            tenant="default",
            workload=answer.workload,
            source="reference",
            target_fingerprint=self.target.files.fingerprint,
            tokenizer_fingerprint=self.target.files.tokenizer_fingerprint,
            drafter=self._drafter.name,
            temperature=0.0,
            top_p=1.0,
            top_k=0,
            structured=False,
            lossless=True,
            train=True,  # it may be read again; it is stored nowhere
            prompt_ids=int32(answer.prompt_ids),
            output_ids=int32(answer.token_ids),
            finish_reason="length",
            rounds=(),
            teacher=TeacherRows(1, b"", b"", b"", b""),
            time_to_first_token_ms=0.0,
            total_ms=answer.seconds * 1e3,
            resident_mb=0.0,
        )
