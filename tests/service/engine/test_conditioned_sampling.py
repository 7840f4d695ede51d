"""Sampled output follows the target's distribution with drafters that are conditioned on its hidden states.

As in `test_sampling`: outputs of four tokens against their exact probabilities, by a chi-squared test.
"""

from dataclasses import replace

import pytest

from adapter.policy import Policy
from adapter.target import Target
from tests.adapter.conditioned import CONDITIONED, first, shaken
from tests.service.engine.oracle import ask, running
from tests.service.engine.small import LENGTH, PROMPT, exact, p_value, small_target

REQUESTS = 400
FALSE_ALARM = 1e-6
POLICIES = (Policy(1.0), Policy(1.2, top_k=3))


@pytest.fixture(scope="module")
def small(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Target:
    """With files of its own, which kinds that run through the target's layers read."""
    made, folder = small_target(target), tmp_path_factory.mktemp("small")
    made.model.save_pretrained(folder)
    return replace(made, files=replace(target.files, path=folder))


@pytest.mark.parametrize("nodes", [0, 7], ids=["chain", "tree"])
@pytest.mark.parametrize("kind", CONDITIONED)
def test_sampled_output_follows_the_targets_distribution(small: Target, kind: str, nodes: int) -> None:
    drafter = shaken(first(small, kind, depths=2))
    total = REQUESTS * len(POLICIES)
    with running(small, drafter, slots=64, draft_length=2, tree_nodes=nodes, context=16, waiting=total) as engine:
        clients = [[ask(engine, PROMPT, LENGTH, policy) for policy in POLICIES] for _ in range(REQUESTS)]
        outputs = [[tuple(client.wait()) for client in column] for column in zip(*clients, strict=True)]
        accepted = sum(r.accepted for row in clients for client in row for r in client.usage.rounds)
        assert engine.lanes.faults == 0
    assert accepted > REQUESTS / 2, "a drafter that is hardly right would prove little"
    for policy, found in zip(POLICIES, outputs, strict=True):
        assert p_value(found, exact(small, policy)) > FALSE_ALARM
