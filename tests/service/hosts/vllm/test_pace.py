"""The governor inside vLLM: it learns what rounds cost from the steps around them, and asks for what pays."""

import time
from collections.abc import Sequence
from typing import Any

import pytest

from adapter.drafters.causal_lm import CausalLM
from adapter.target import Target
from service.engine.governor import GovernorConfig
from service.hosts.vllm.core import Core
from service.hosts.vllm.drafting import Bounds
from service.placing import Offer
from tests.service.engine.oracle import first_layers
from tests.service.hosts.vllm.engine import Asked, Engine, said_by
from tests.service.hosts.vllm.test_core import version

K, CONTEXT, TOKENS = 3, 160, 24


@pytest.fixture(scope="module")
def drafter(target: Target) -> CausalLM:
    return first_layers(target, layers=1, vocabulary=200, seed=1)


def proposals(drafter: CausalLM, agrees: float, step_seconds: float, requests: int = 24) -> list[int]:
    """How many tokens were proposed for each row of the second half of the steps, where vLLM takes so long a step."""
    core = Core(Bounds(2, CONTEXT, K, 10_000, 2**28), lambda request: None, governor=GovernorConfig())
    core.take(Offer(1, version(1), drafter.twin()))
    engine, found = Engine(rows=2, context=CONTEXT), []
    for n in range(requests):
        prompt = [n + 2, 5, 9]
        engine.submit(Asked(f"r{n}", prompt, said_by(drafter, prompt, TOKENS + K + 1, n, agrees), TOKENS))

    def step(*arrays: Any) -> list[list[int]]:
        time.sleep(step_seconds)
        chains: Sequence[list[int]] = core.step(*arrays)
        found.extend(len(chain) for chain in chains)
        return list(chains)

    engine.run(core.begins, step)
    return found[len(found) // 2 :]


def test_a_drafter_that_is_never_right_is_soon_asked_for_next_to_nothing(drafter: CausalLM) -> None:
    asked = proposals(drafter, agrees=0.0, step_seconds=0.0)
    assert sum(asked) / len(asked) < 0.5


def test_a_drafter_that_is_always_right_is_asked_for_all_that_it_may_propose(drafter: CausalLM) -> None:
    asked = proposals(drafter, agrees=1.0, step_seconds=0.05)  # long beside a proposal of a busy machine
    assert sum(asked) / len(asked) > 0.5 * K
