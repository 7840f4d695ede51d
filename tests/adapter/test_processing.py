"""Processing, batched, against the slow and obvious way, one position at a time."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from adapter.policy import Policy
from adapter.processing import DraftVocabulary, History, favour, mask, penalise, probabilities
from tests.adapter.slow_sampling import adjusted, distribution

POLICIES = {
    "temperature": Policy(0.7),
    "hot": Policy(2.0),
    "top_k": Policy(0.9, top_k=5),
    "top_k_over_a_window": Policy(0.9, top_k=1500),
    "top_k_over_the_vocabulary": Policy(0.9, top_k=10**6),
    "top_p": Policy(0.9, top_p=0.6),
    "top_p_of_nearly_all": Policy(1.3, top_p=0.999),
    "top_k_and_top_p": Policy(0.9, top_k=40, top_p=0.6),
    "wide_top_k_and_top_p": Policy(2.0, top_k=1500, top_p=0.99),
    "min_p": Policy(0.9, min_p=0.1),
    "all": Policy(1.2, top_k=60, top_p=0.95, min_p=0.05),
    "only_the_likeliest": Policy(1.0, top_p=1e-6),
}
WIDE = torch.randn(3, 20_000, generator=torch.Generator().manual_seed(1))  # so flat that no window holds top_p of it
PEAKED = torch.randn(3, 400, generator=torch.Generator().manual_seed(2)) * 4


def identity_of(ids: torch.Tensor, size: int) -> DraftVocabulary:
    inverse = torch.full((size,), -1)
    inverse[ids] = torch.arange(len(ids))
    return DraftVocabulary(ids, inverse)


@pytest.mark.parametrize("logits", [WIDE, PEAKED], ids=["wide", "peaked"])
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_probabilities_are_those_of_the_slow_way(policy: Policy, logits: torch.Tensor) -> None:
    found = probabilities(logits[None], [policy])[0]
    for row, expected in zip(found, logits, strict=True):
        np.testing.assert_allclose(row.numpy(), distribution(expected, policy), rtol=2e-4, atol=1e-9)


@pytest.mark.parametrize("logits", [WIDE, PEAKED], ids=["wide", "peaked"])
def test_each_row_of_a_batch_has_its_own_policy(logits: torch.Tensor) -> None:
    policies = list(POLICIES.values())
    together = probabilities(logits.expand(len(policies), *logits.shape), policies)
    for row, policy in zip(together, policies, strict=True):
        assert torch.equal(row, probabilities(logits[None], [policy])[0])


def test_equals_at_the_edge_of_a_set_are_all_kept_so_that_no_sort_decides() -> None:
    logits = torch.tensor([[[2.0, 1.0, 1.0, 1.0, 0.0]]])
    for policy in (Policy(1.0, top_k=2), Policy(1.0, top_p=0.5)):
        assert (probabilities(logits, [policy])[0, 0] > 0).tolist() == [True, True, True, True, False]


def test_a_temperature_that_float32_cannot_tell_from_zero_gives_a_point_mass() -> None:
    assert probabilities(PEAKED[None, :1] * 50, [Policy(1e-30)]).max() == 1.0


@settings(max_examples=60)
@given(
    prompt=st.lists(st.integers(0, 11), max_size=6),
    output=st.lists(st.integers(0, 11), max_size=6),
    drafted=st.lists(st.integers(0, 11), max_size=4),
    policy=st.builds(
        Policy,
        repetition_penalty=st.sampled_from([1.0, 1.3, 0.5]),
        presence_penalty=st.sampled_from([0.0, 0.7, -2.0]),
        frequency_penalty=st.sampled_from([0.0, 0.4]),
        logit_bias=st.sampled_from([(), ((3, 5.0), (11, -100.0))]),
    ),
    reduced=st.booleans(),
)
def test_every_position_is_adjusted_for_the_tokens_drafted_before_it(
    prompt: list[int], output: list[int], drafted: list[int], policy: Policy, reduced: bool
) -> None:
    vocabulary = identity_of(torch.tensor([11, 2, 3, 5, 0]), 12) if reduced else None
    kept = torch.arange(12) if vocabulary is None else vocabulary.to_target
    logits = torch.randn(len(drafted) + 1, 12, generator=torch.Generator().manual_seed(3)) * 3
    found = logits[:, kept].clone()
    favour(found, policy.logit_bias, vocabulary)
    penalise(found, policy, History(prompt, output), drafted, vocabulary)
    for i, row in enumerate(found):
        expected = adjusted(logits[i], policy, prompt, output + drafted[:i])[kept.numpy()]
        np.testing.assert_allclose(row.numpy(), expected, rtol=1e-5, atol=1e-5)


def test_a_drafters_one_position_sees_all_that_was_drafted() -> None:
    policy, logits = Policy(frequency_penalty=0.5), torch.zeros(1, 6)
    penalise(logits, policy, History([], []), [4, 4, 1], None)
    assert logits[0].tolist() == [0.0, -0.5, 0.0, 0.0, -1.0, 0.0]


def test_a_history_grows_with_its_output() -> None:
    output = [1]
    history = History([7, 7, 3], output)
    assert [part.tolist() for part in history.tensors()] == [[7, 3, 1], [0.0, 0.0, 1.0]]
    output += [3, 9, 3]
    assert [part.tolist() for part in history.tensors()] == [[7, 3, 1, 9], [0.0, 2.0, 1.0, 1.0]]


def test_what_is_not_allowed_has_no_probability() -> None:
    logits = torch.zeros(2, 4)
    mask(logits, torch.tensor([[True, False, True, False], [False, False, False, True]]), None)
    assert probabilities(logits[None], [Policy()])[0].tolist() == [[0.5, 0.0, 0.5, 0.0], [0.0, 0.0, 0.0, 1.0]]


def test_a_draft_vocabulary_without_an_allowed_token_still_proposes() -> None:
    logits = torch.zeros(1, 2)
    mask(logits, torch.tensor([[True, False, False, False]]), identity_of(torch.tensor([1, 2]), 4))
    assert probabilities(logits[None], [Policy()])[0, 0].tolist() == [0.5, 0.5]
