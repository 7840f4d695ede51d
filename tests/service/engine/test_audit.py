"""The identity audit: a difference counts as a near-tie only where the target's own logits are one."""

import time

import pytest
import torch

from adapter.policy import Policy
from adapter.target import Target
from service.engine import audit
from service.engine.audit import compare
from service.engine.engine import Engine
from tests.service.engine.oracle import ask, first_layers, plain_greedy, random_prompt, running


def with_twin(logits: torch.Tensor, original: int, twin: int) -> torch.Tensor:
    """The same logits, but that one token always ties with another."""
    logits = logits.clone()
    logits[..., twin] = logits[..., original]
    return logits


def verdicts(engine: Engine, count: int) -> dict[str, int]:
    """What the audits said, once that many are through."""
    deadline = time.monotonic() + 120
    while engine.audit.verdicts.total() < count and time.monotonic() < deadline:
        time.sleep(0.01)
    return dict(engine.audit.verdicts)


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
    head = target.model.get_output_embeddings()
    hook = head.register_forward_hook(lambda module, given, logits: with_twin(logits, plain[3], twin))
    try:
        tied = plain_greedy(target, prompt, 4)
        other = [*tied[:3], twin if tied[3] == plain[3] else plain[3]]
        found = compare(target, prompt, tied, other)
    finally:
        hook.remove()
    assert found.verdict == "near_tie"
    assert found.gap == 0.0


def test_the_bound_follows_the_precision(target: Target) -> None:
    assert torch.finfo(torch.bfloat16).eps > 1000 * torch.finfo(target.dtype).eps


def test_greedy_requests_are_decoded_again_and_found_identical(target: Target) -> None:
    with running(target, first_layers(target, layers=2), audit_share=1.0) as engine:
        clients = [ask(engine, random_prompt(target, seed)) for seed in range(4)]
        for client in clients:
            client.wait()
        assert verdicts(engine, 4) == {"identical": 4}
        assert engine.running == 0


def test_a_defect_of_verification_is_found(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where proposals are taken as they come, plain decoding says something else."""

    def credulous(tokens: torch.Tensor, choices: torch.Tensor) -> torch.Tensor:
        return torch.full((len(tokens),), tokens.shape[1])

    monkeypatch.setattr("adapter.sampling.matching_prefix", credulous)
    with running(target, first_layers(target, layers=1), audit_share=1.0) as engine:
        ask(engine, random_prompt(target, 1)).wait()
        assert verdicts(engine, 1) == {"different": 1}


def test_only_requests_whose_text_the_target_alone_decides_are_audited(target: Target) -> None:
    with running(target, first_layers(target, layers=2), audit_share=1.0) as engine:
        ask(engine, random_prompt(target, 1), policy=Policy(temperature=1.0)).wait()
        ask(engine, random_prompt(target, 1), policy=Policy(temperature=0.0, presence_penalty=1.0)).wait()
        ask(engine, random_prompt(target, 1), draft_length=0).wait()
        ask(engine, random_prompt(target, 1)).wait()
        assert verdicts(engine, 1) == {"identical": 1}


def test_more_audits_than_may_wait_are_skipped_and_counted(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.engine.inbox.AUDITS", 0)
    with running(target, first_layers(target, layers=2), audit_share=1.0) as engine:
        ask(engine, random_prompt(target, 1)).wait()
        assert verdicts(engine, 1) == {"skipped": 1}


def test_a_share_of_the_requests_is_audited(target: Target) -> None:
    chosen = [audit.share_of(f"audit r{i}") < 0.1 for i in range(2000)]
    assert 150 < sum(chosen) < 250
