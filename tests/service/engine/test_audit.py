"""The identity audit: a difference counts as a near-tie only where the target's own logits are one."""

import torch

from adapter.target import Target
from service.engine.audit import compare
from tests.service.engine.oracle import plain_greedy, random_prompt


def test_equal_outputs_are_identical(target: Target) -> None:
    assert compare(target, [5, 6], [7, 8], [7, 8]).verdict == "identical"


def test_another_token_is_different(target: Target) -> None:
    prompt = random_prompt(target, 1)
    plain = plain_greedy(target, prompt, 6)
    other = [*plain[:3], (plain[3] + 1) % target.vocab_size, *plain[4:]]
    found = compare(target, prompt, plain, other)
    assert (found.verdict, found.position) == ("different", 3)
    assert found.gap > found.bound > 0


def test_a_shorter_output_is_different(target: Target) -> None:
    prompt = random_prompt(target, 1)
    plain = plain_greedy(target, prompt, 6)
    assert compare(target, prompt, plain, plain[:4]).verdict == "different"


def test_a_tie_of_the_targets_own_logits_is_a_near_tie(target: Target) -> None:
    prompt = random_prompt(target, 1)
    plain = plain_greedy(target, prompt, 6)
    twin = (plain[3] + 1) % target.vocab_size
    embedding = target.embedding  # tied to the head: equal rows give equal logits
    kept = embedding[twin].clone()
    try:
        embedding[twin] = embedding[plain[3]]
        tied = plain_greedy(target, prompt, 4)
        other = [*tied[:3], twin if tied[3] == plain[3] else plain[3]]
        found = compare(target, prompt, tied, other)
    finally:
        embedding[twin] = kept
    assert found.verdict == "near_tie"
    assert found.gap == 0.0


def test_the_bound_follows_the_precision(target: Target) -> None:
    assert torch.finfo(torch.bfloat16).eps > 1000 * torch.finfo(target.dtype).eps
