"""That a replayed request is the one that a server with the same drafter would have recorded."""

import pytest

from adapter.drafters.causal_lm import CausalLM
from adapter.policy import Policy
from adapter.sample import answers
from adapter.target import Target
from benchmarks.arms import EngineArm, Play
from benchmarks.traffic import Drafting, play, probability
from benchmarks.workload import Workload
from service.engine.engine import EngineConfig
from service.origin import Origin
from service.recording import record_of
from storage.records import FeedbackRecord
from storage.validation import validate

TOKENS = 24


@pytest.mark.parametrize("k", [1, 2, 4])
def test_rounds_and_teacher_rows_are_those_of_the_engine(
    target: Target, drafter: CausalLM, prompts: Workload, k: int
) -> None:
    served: list[FeedbackRecord] = []
    origin = Origin(target.files.fingerprint, target.files.tokenizer_fingerprint, "tiny")
    config = EngineConfig(draft_length=k, slots=1, context=256, audit_share=0.0)
    arm = EngineArm("speculative", target, config, drafter, train=True,
                    on_finished=lambda generation: served.append(record_of(generation, origin)))  # fmt: skip
    arm.run(Play("tiny", prompts.prompts, Policy(temperature=0.0), TOKENS))
    arm.close()
    for theirs, answer in zip(served, answers(target, prompts.prompts, TOKENS), strict=True):
        ours, point = play(Drafting("tiny", 1, drafter, k), answer)
        assert ours.output_ids == theirs.output_ids
        assert whole(ours, k) == whole(theirs, k)
        assert inside(ours, k) == inside(theirs, k)
        assert point.rounds == tuple((r.proposed, r.accepted) for r in ours.rounds)
        validate(ours, target.vocab_size)


def whole(record: FeedbackRecord, k: int) -> list[tuple[int, int, int, int]]:
    """The rounds that end before the output does: an engine that knows the end near proposes less."""
    return [(r.start, r.version, r.proposed, r.accepted) for r in record.rounds if r.start + k < len(record.output)]


def inside(record: FeedbackRecord, k: int) -> list[int]:
    """Output positions of the teacher rows of these rounds."""
    last = max(start + k for start, *_ in whole(record, k))
    return [position for position in record.teacher.arrays()[0].tolist() if position < last - k]


def test_the_acceptance_probability_of_a_request_is_a_share_of_its_positions(
    target: Target, drafter: CausalLM, prompts: Workload
) -> None:
    found = list(answers(target, prompts.prompts, TOKENS))
    points = [play(Drafting("tiny", 1, drafter, 2), answer)[1] for answer in found]
    for point, answer in zip(points, found, strict=True):
        assert point.probability is not None
        positions = len(answer.output) - 1
        assert point.probability * positions == pytest.approx(round(point.probability * positions))
    shares = [point.probability for point in points if point.probability is not None]
    assert probability(drafter, tuple(found)) == pytest.approx(sum(shares) / len(shares))


def test_an_answer_of_one_token_has_no_acceptance_probability(
    target: Target, drafter: CausalLM, prompts: Workload
) -> None:
    (answer,) = answers(target, prompts.prompts[:1], 1)
    record, point = play(Drafting("tiny", 1, drafter, 2), answer)
    assert (point.probability, point.rounds, record.rounds) == (None, (), ())
    assert probability(drafter, (answer,)) == 0.0
