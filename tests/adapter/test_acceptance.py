"""The acceptance rule against the golden vectors of the literature study, and against known wrong algorithms.

Sampled tests draw 20,000 tokens with a fixed seed and use a chi-squared test at 1e-6: were the seed free, a
right algorithm would fail once in a million runs. The wrong ones miss p by a total variation of 0.11 or more,
which that many draws cannot hide.
"""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor

from adapter.acceptance import (
    Acceptance,
    acceptance_probability,
    distribution,
    draw,
    expected_length,
    expected_speed_up,
    matching_prefix,
    residual,
    verify_chain,
)
from adapter.policy import Policy

DRAWS = 20_000
FALSE_ALARM = 1e-6
P = torch.tensor([0.4, 0.3, 0.2, 0.1])
Q = torch.tensor([0.1, 0.2, 0.3, 0.4])
P2 = torch.tensor([0.7, 0.3])
Q2 = torch.tensor([0.5, 0.5])

Step = Callable[[Tensor, Tensor, torch.Generator], int]


def right(p: Tensor, q: Tensor, generator: torch.Generator) -> int:
    """The first token that one round of a chain of length 1 emits."""
    token = draw(q, generator)
    accepted, following = verify_chain(torch.stack([p, p]), q[None], [token], generator)
    return token if accepted else following


def raw_q(p: Tensor, q: Tensor, generator: torch.Generator) -> int:
    """G8: drafts from the top 2 of q, but puts the raw q into the ratio."""
    truncated = torch.zeros_like(q).scatter_(0, q.topk(2).indices, q.topk(2).values)
    token = draw(truncated / truncated.sum(), generator)
    accepted, following = verify_chain(torch.stack([p, p]), q[None], [token], generator)
    return token if accepted else following


def retrospective(p: Tensor, q: Tensor, generator: torch.Generator) -> int:
    """G9: chooses the draft length after looking at the token, and verifies only what it likes."""
    token = draw(q, generator)
    return token if p[token] >= q[token] else draw(p, generator)


def dropping(p: Tensor, q: Tensor, generator: torch.Generator) -> int:
    """G10: drops proposals that the drafter was unsure of."""
    token = draw(q, generator)
    if q[token] < 0.3:
        return draw(p, generator)
    accepted, following = verify_chain(torch.stack([p, p]), q[None], [token], generator)
    return token if accepted else following


def frequencies(step: Step, p: Tensor, q: Tensor) -> np.ndarray:
    generator = torch.Generator().manual_seed(20260101)
    return np.bincount([step(p, q, generator) for _ in range(DRAWS)], minlength=len(p))


@pytest.mark.parametrize(("p", "q"), [(P, Q), (P2, Q2), (Q, P)])
def test_what_is_emitted_is_distributed_as_the_target(p: Tensor, q: Tensor) -> None:
    assert (
        chisquare(frequencies(right, p, q), p.double().numpy() / p.double().sum().item() * DRAWS).pvalue > FALSE_ALARM
    )


@pytest.mark.parametrize(
    ("wrong", "p", "q", "emitted"),
    [
        (raw_q, P, Q, [0.4286, 0.1429, 0.2857, 0.1429]),
        (retrospective, P2, Q2, [0.85, 0.15]),
        (dropping, P, Q, [0.42, 0.19, 0.26, 0.13]),
    ],
    ids=["G8", "G9", "G10"],
)
def test_the_known_wrong_algorithms_are_told_apart(wrong: Step, p: Tensor, q: Tensor, emitted: list[float]) -> None:
    counts = frequencies(wrong, p, q)
    assert chisquare(counts, p.double().numpy() / p.double().sum().item() * DRAWS).pvalue < FALSE_ALARM
    assert np.abs(counts / DRAWS - emitted).max() < 0.02  # five standard deviations


def test_g1_acceptance_probability_and_residual() -> None:
    assert acceptance_probability(P, Q).item() == pytest.approx(0.6)
    assert residual(P, Q).tolist() == pytest.approx([0.75, 0.25, 0.0, 0.0])


def test_g2_acceptance_probability_and_residual() -> None:
    assert acceptance_probability(P2, Q2).item() == pytest.approx(0.8)
    assert residual(P2, Q2).tolist() == pytest.approx([1.0, 0.0])


@pytest.mark.parametrize(
    ("alpha", "k", "length", "speed_up"),
    [
        (0.6, 5, 2.38336, 1.9067),
        (0.7, 5, 2.94117, 2.3529),
        (0.8, 4, 3.3616, 2.8013),
        (0.8, 5, 3.68928, 2.9514),
        (0.9, 7, 5.695328, 4.2188),
    ],
)
def test_g6_expected_length_and_speed_up(alpha: float, k: int, length: float, speed_up: float) -> None:
    assert expected_length(alpha, k) == pytest.approx(length, abs=1e-5)
    assert expected_speed_up(alpha, k, 0.05) == pytest.approx(speed_up, abs=1e-4)


def test_a_perfect_drafter_gives_k_plus_one() -> None:
    assert expected_length(1.0, 4) == 5.0


def test_g7_the_histogram_gives_survival_length_and_rate() -> None:
    survival = (0.9, 0.72, 0.504, 0.3024, 0.1512)
    rounds = 1_250_000
    reached = [round(rounds * s) for s in (1.0, *survival)]
    histogram = tuple(here - there for here, there in zip(reached, [*reached[1:], 0], strict=True))
    accepted = sum(j * count for j, count in enumerate(histogram))
    figures = Acceptance(rounds, 5 * rounds, accepted, histogram)
    assert figures.survival == pytest.approx(survival)
    assert figures.length == pytest.approx(3.5776)
    assert figures.length == pytest.approx(1 + sum(figures.survival))
    assert figures.rate == pytest.approx(0.51552)
    assert expected_length(0.7, 5) == pytest.approx(2.9412, abs=1e-4)  # what a mean alpha would have said


def test_the_three_figures_of_some_rounds() -> None:
    figures = Acceptance.of([(4, 0), (4, 4), (2, 1)])
    assert (figures.rate, figures.length) == (0.5, 1 + 5 / 3)
    assert figures.histogram == (1, 1, 0, 0, 1)


def test_a_residual_of_nothing_falls_back_to_the_target() -> None:
    assert residual(P, P).equal(P)


def test_a_token_outside_the_target_is_never_accepted() -> None:
    p, q = torch.tensor([0.0, 1.0]), torch.tensor([1.0, 0.0])
    generator = torch.Generator().manual_seed(0)
    assert all(verify_chain(torch.stack([p, p]), q[None], [0], generator) == (0, 1) for _ in range(100))


def test_greedy_counts_only_the_leading_matches() -> None:
    proposed = torch.tensor([[1, 2, 3], [9, 2, 3], [1, 9, 3]])
    assert matching_prefix(proposed, torch.tensor([[1, 2, 3]]).expand(3, 3)).tolist() == [3, 0, 1]


def test_temperature_zero_is_a_point_mass_on_the_argmax() -> None:
    assert distribution(torch.tensor([1.0, 3.0, 2.0]), Policy(temperature=0.0)).tolist() == [0.0, 1.0, 0.0]


def test_top_k_keeps_the_k_most_probable() -> None:
    probs = distribution(torch.tensor([0.4, 0.3, 0.2, 0.1]).log(), Policy(1.0, top_k=2))
    assert probs.tolist() == pytest.approx([4 / 7, 3 / 7, 0.0, 0.0])


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    probs = distribution(torch.tensor([0.4, 0.3, 0.2, 0.1]).log(), Policy(1.0, top_p=0.65))
    assert probs.tolist() == pytest.approx([4 / 7, 3 / 7, 0.0, 0.0])


@pytest.mark.parametrize(
    "bad", [{"temperature": -1.0}, {"temperature": 3.0}, {"top_p": 0.0}, {"top_p": 1.5}, {"top_k": -1}]
)
def test_a_policy_outside_its_range_is_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        Policy(**bad)  # type: ignore[arg-type]
