"""Replay and evaluation: exact for greedy requests, unbiased enough for sampled ones, paired in both."""

import msgspec
import numpy as np
import pytest
import torch

from adapter.drafters.causal_lm import CausalLM
from adapter.replay import Paired, compare, evaluate, matches, overlaps, rounds, scored
from adapter.target import Target
from storage.records import FeedbackRecord, Round
from tests.adapter.feedback import refusals, served


@pytest.fixture(scope="module")
def one(target: Target) -> CausalLM:
    return CausalLM.from_target(target.model, 1, torch.arange(0, target.vocab_size, 2))


@pytest.fixture(scope="module")
def two(target: Target) -> CausalLM:
    return CausalLM.from_target(target.model, 2, torch.arange(target.vocab_size))


@torch.no_grad()
def speculative(
    target: Target, drafter: CausalLM, prompt: list[int], max_tokens: int, k: int
) -> tuple[list[int], list[tuple[int, int]]]:
    """Slow real speculative decoding, no cache: the output, and (proposed, accepted) of what was committed."""

    def plain(sequence: list[int]) -> int:
        return int(target.model(input_ids=torch.tensor([sequence])).logits[0, -1].argmax())

    def draft(sequence: list[int]) -> int:
        logits = drafter.logits(drafter.hidden(torch.tensor([sequence]))[0, -1])
        return int(drafter.draft_to_target[logits.argmax()])

    output, played = [plain(prompt)], []
    while len(output) < max_tokens and output[-1] not in target.eos_ids:
        proposal: list[int] = []
        for _ in range(k):
            proposal.append(draft(prompt + output + proposal))
        start, accepted = len(output), 0
        for token in proposal:
            choice = plain(prompt + output)
            output.append(choice)
            if choice != token:
                break
            accepted += 1
        else:
            output.append(plain(prompt + output))
        ends = [i for i in range(start, len(output)) if output[i] in target.eos_ids]
        output = output[: min([max_tokens, *(end + 1 for end in ends)])]
        played.append((start, accepted))
    rooms = [(len(output) - start, accepted) for start, accepted in played]
    return output, [(min(k, room), min(accepted, room)) for room, accepted in rooms]


@pytest.mark.parametrize("k", [1, 2, 4, 7])
def test_replay_gives_every_round_of_a_real_speculative_decode(
    target: Target, two: CausalLM, answered: list[FeedbackRecord], k: int
) -> None:
    accepted = 0
    for record in answered[:6]:
        output, played = speculative(target, two, record.prompt.tolist(), 24, k)
        assert output == record.output.tolist()
        assert rounds(matches(two, record), k) == played
        accepted += sum(a for _, a in played)
    assert accepted > 0, "a drafter that is never right would prove nothing"


def test_a_drafter_that_is_the_target_is_accepted_everywhere(target: Target, answered: list[FeedbackRecord]) -> None:
    same = CausalLM.from_target(target.model, 3, torch.arange(target.vocab_size))
    assert all(matches(same, record).all() for record in answered)


def test_the_first_output_token_belongs_to_no_round() -> None:
    assert rounds(np.array([False]), 4) == []
    assert rounds(np.array([False, True]), 4) == [(1, 1)]


def test_rounds_go_on_behind_the_next_token_and_stop_at_the_end() -> None:
    matched = np.array([False, True, True, False, True, True, True, True, True])
    assert rounds(matched, 4) == [(4, 2), (4, 4)]  # the fifth proposal of the second round was never made
    assert rounds(matched, 2) == [(2, 2), (2, 2), (2, 2)]
    assert rounds(matched, 8) == [(8, 2), (5, 5)]


def test_with_all_rows_and_all_tokens_the_overlap_is_that_of_the_full_distributions(
    target: Target, two: CausalLM, answered: list[FeedbackRecord]
) -> None:
    record = answered[0]
    tokens = torch.tensor([record.prompt.tolist() + record.output[:-1].tolist()])
    with torch.no_grad():
        p = target.model(input_ids=tokens).logits[0, len(record.prompt) - 1 :].softmax(-1)
        q = two.logits(two.hidden(tokens))[0, len(record.prompt) - 1 :].softmax(-1)
    exact = torch.minimum(p, q).sum(-1).numpy()
    found = overlaps(two, record)
    assert bool((found >= exact - 0.01).all())  # a bucket can only raise it
    assert bool((found <= exact + p.topk(16).values.sum(-1).neg().add(1).numpy() + 0.01).all())


def test_a_better_candidate_gains_and_the_interval_says_so(
    one: CausalLM, two: CausalLM, target: Target, answered: list[FeedbackRecord]
) -> None:
    same = CausalLM.from_target(target.model, 3, torch.arange(target.vocab_size))
    overall = evaluate(same, one, answered, k=4).overall
    assert overall.candidate_probability == 1.0
    assert 0 < overall.gain_low <= overall.gain <= overall.gain_high
    assert overall.gain == pytest.approx(overall.candidate_probability - overall.parent_probability)
    assert overall.candidate_length > overall.parent_length
    assert overall.positions == sum(len(r.output) - 1 for r in answered)


def test_a_candidate_equal_to_its_parent_gains_nothing(one: CausalLM, answered: list[FeedbackRecord]) -> None:
    overall = evaluate(one, one, answered, k=4).overall
    assert (overall.gain, overall.gain_low, overall.gain_high) == (0.0, 0.0, 0.0)


def test_workloads_and_policies_are_scored_apart(one: CausalLM, two: CausalLM, answered: list[FeedbackRecord]) -> None:
    holdout = [msgspec.structs.replace(r, workload="sql") for r in answered[:3]]
    holdout += [served(one, r, temperature=1.0) for r in answered[3:8]]
    holdout += answered[8:10]
    evaluation = evaluate(two, one, holdout, k=4)
    found = [(s.workload, s.policy, s.requests) for s in evaluation.scores]
    assert found == [("default", "greedy", 2), ("default", "sampled", 5), ("sql", "greedy", 3)]
    assert evaluation.requests == 10
    assert (evaluation.overall.workload, evaluation.overall.policy, evaluation.overall.requests) == ("all", "greedy", 5)
    assert {s.workload: s.parent_length for s in evaluation.scores if s.policy == "sampled"} == {"default": 1.0}


def test_over_all_a_workload_counts_by_its_requests_and_not_by_their_length() -> None:
    def pair(workload: str, positions: int, gain: float) -> Paired:
        own = positions * (0.3 + gain)
        return Paired(workload, "greedy", positions, float(positions), positions * 0.3, own, (), ())

    pairs = [*(pair("chat", 400, 0.1) for _ in range(5)), *(pair("sql", 10, -0.1) for _ in range(15))]
    overall = scored(pairs, k=4).overall
    assert overall.gain == pytest.approx((5 * 0.1 - 15 * 0.1) / 20)
    assert (overall.requests, overall.positions) == (20, 5 * 400 + 15 * 10)


def test_a_greedy_answer_under_a_penalty_is_not_replayed(one: CausalLM, answered: list[FeedbackRecord]) -> None:
    assert compare(one, one, msgspec.structs.replace(answered[0], adjusted=True), k=4) is None
    assert compare(one, one, msgspec.structs.replace(answered[0], structured=True), k=4) is None


def test_the_gate_is_told_nothing_of_a_lossy_answer(one: CausalLM, answered: list[FeedbackRecord]) -> None:
    for record in (answered[0], msgspec.structs.replace(answered[0], temperature=1.0)):
        assert compare(one, one, record, k=4) is not None
        assert compare(one, one, msgspec.structs.replace(record, lossless=False), k=4) is None


def test_rejections_only_do_not_make_another_drafter_look_better(
    one: CausalLM, two: CausalLM, answered: list[FeedbackRecord]
) -> None:
    """The rows of a sampled request are where the parent was refused by chance, more often where it is bad.

    Weighted, the estimate comes near that over all positions; unweighted, it is far below for the parent.
    """
    generator = np.random.default_rng(3)
    all_rows = [msgspec.structs.replace(r, temperature=1.0) for r in answered]
    exact = evaluate(two, one, all_rows, k=4).overall
    thinned = [_refused_by_chance(one, r, generator) for _ in range(30) for r in all_rows]
    found = evaluate(two, one, thinned, k=4).overall
    naive = float(np.mean(np.concatenate([overlaps(one, r) for r in thinned])))
    assert found.parent_probability == pytest.approx(exact.parent_probability, abs=0.01)
    assert found.candidate_probability == pytest.approx(exact.candidate_probability, abs=0.01)
    assert naive < exact.parent_probability - 0.03


def _refused_by_chance(drafter: CausalLM, record: FeedbackRecord, generator: np.random.Generator) -> FeedbackRecord:
    refused = np.flatnonzero(generator.random(len(record.output)) > overlaps(drafter, record))
    return refusals(record, refused.tolist())


def test_rows_of_plainly_decoded_tokens_stand_for_all_of_those(
    one: CausalLM, two: CausalLM, answered: list[FeedbackRecord]
) -> None:
    """Every third row of a plain output, and refusals in a short stretch with rounds, come near all positions."""
    all_rows = [msgspec.structs.replace(r, temperature=1.0) for r in answered]
    exact = evaluate(two, one, all_rows, k=4).overall
    thinned = [_plain_but_for_some_rounds(one, r, first) for r in all_rows for first in range(3)]
    found = evaluate(two, one, thinned, k=4).overall
    assert found.parent_probability == pytest.approx(exact.parent_probability, abs=0.02)
    assert found.candidate_probability == pytest.approx(exact.candidate_probability, abs=0.02)


def _plain_but_for_some_rounds(drafter: CausalLM, record: FeedbackRecord, first: int) -> FeedbackRecord:
    """Three rounds of one proposal, refused by chance as they would be; all other tokens decoded plainly."""
    generator = np.random.default_rng(first)
    refused = [t for t in (1, 3, 5) if generator.random() > overlaps(drafter, record)[t]]
    played = tuple(Round(t, 1, 1, int(t not in refused), -1, 0.0, 1.0, 1.0) for t in (1, 3, 5))
    plain = [0, *range(7 + first, len(record.output), 3)]
    return msgspec.structs.replace(record, rounds=played, teacher=record.teacher.at(sorted(refused + plain)))


def test_an_empty_holdout_has_no_gain(one: CausalLM) -> None:
    evaluation = evaluate(one, one, [], k=4)
    assert (evaluation.requests, evaluation.scores, evaluation.overall.gain) == (0, (), 0.0)
