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
    Drawn,
    acceptance_probability,
    draw,
    expected_length,
    expected_speed_up,
    matching_prefix,
    residual,
    verify_chain,
)

DRAWS = 20_000
FALSE_ALARM = 1e-6
P = torch.tensor([0.4, 0.3, 0.2, 0.1])
Q = torch.tensor([0.1, 0.2, 0.3, 0.4])
P2 = torch.tensor([0.7, 0.3])
Q2 = torch.tensor([0.5, 0.5])

Step = Callable[[Tensor, Tensor, Tensor], Tensor]


def uniforms(*shape: int, seed: int = 20260101) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def chain(tokens: Tensor, q: Tensor) -> Drawn:
    """Chains [S, k] said to be drawn from q [S, k, V]."""
    return Drawn(tokens, q, q.gather(-1, tokens[..., None])[..., 0])


def first(p: Tensor, q: Tensor, token: Tensor, u: Tensor) -> Tensor:
    """The first token that a round with one proposal emits, in each of many runs [R]."""
    many = p.expand(len(token), 2, -1)
    drawn = chain(token[:, None], q.expand(len(token), 1, -1))
    accepted, following, _ = verify_chain(many, drawn, torch.ones_like(token), u)
    return torch.where(accepted > 0, token, following)


def right(p: Tensor, q: Tensor, u: Tensor) -> Tensor:
    return first(p, q, draw(q.expand(len(u), -1), u[:, 0]), u[:, 1:])


def raw_q(p: Tensor, q: Tensor, u: Tensor) -> Tensor:
    """G8: drafts from the top 2 of q, but puts the raw q into the ratio."""
    truncated = torch.zeros_like(q).scatter_(0, q.topk(2).indices, q.topk(2).values)
    return first(p, q, draw(truncated.expand(len(u), -1), u[:, 0]), u[:, 1:])


def retrospective(p: Tensor, q: Tensor, u: Tensor) -> Tensor:
    """G9: chooses the draft length after looking at the token, and verifies only what it likes."""
    token = draw(q.expand(len(u), -1), u[:, 0])
    return torch.where(p[token] >= q[token], token, draw(p.expand(len(u), -1), u[:, 2]))


def dropping(p: Tensor, q: Tensor, u: Tensor) -> Tensor:
    """G10: drops proposals that the drafter was unsure of."""
    token = draw(q.expand(len(u), -1), u[:, 0])
    return torch.where(q[token] < 0.3, draw(p.expand(len(u), -1), u[:, 2]), first(p, q, token, u[:, 1:]))


def shared_uniform(p: Tensor, q: Tensor, u: Tensor) -> Tensor:
    """Draws the recovered token by the uniform that refused the proposal."""
    return first(p, q, draw(q.expand(len(u), -1), u[:, 0]), u[:, [1, 1]])


def frequencies(step: Step, p: Tensor, q: Tensor) -> np.ndarray:
    return np.bincount(step(p, q, uniforms(DRAWS, 3)).numpy(), minlength=len(p))


def odds(p: Tensor) -> np.ndarray:
    expected: np.ndarray = p.double().numpy() / p.double().sum().item() * DRAWS
    return expected


@pytest.mark.parametrize(("p", "q"), [(P, Q), (P2, Q2), (Q, P)])
def test_what_is_emitted_is_distributed_as_the_target(p: Tensor, q: Tensor) -> None:
    assert chisquare(frequencies(right, p, q), odds(p)).pvalue > FALSE_ALARM


def test_a_chain_over_a_draft_vocabulary_emits_sequences_distributed_as_the_target() -> None:
    """Two proposals from three of the four tokens; p and q differ by position; lengths 0 to 2 share the batch."""
    p = torch.stack([P, Q, P.flip(0)])
    to_target = torch.tensor([3, 0, 2])
    q = torch.tensor([[0.5, 0.3, 0.2], [0.2, 0.2, 0.6]])
    u = uniforms(DRAWS, 6)
    tokens = torch.stack([draw(q[j].expand(DRAWS, -1), u[:, j]) for j in (0, 1)], dim=1)
    many = q.expand(DRAWS, -1, -1)
    drawn = Drawn(to_target[tokens], many, many.gather(-1, tokens[..., None])[..., 0], to_target)
    lengths = torch.arange(DRAWS) % 3
    accepted, following, _ = verify_chain(p.expand(DRAWS, -1, -1), drawn, lengths, u[:, 2:5])
    emitted = torch.cat([to_target[tokens], following[:, None]], dim=1)
    emitted.scatter_(1, accepted[:, None], following[:, None])
    later = draw(Q.expand(DRAWS, -1), u[:, 5])  # what a further round would add, where only one token came out
    second = torch.where(accepted > 0, emitted[:, 1], later)
    assert set(accepted[lengths == 2].tolist()) == {0, 1, 2}
    pairs = np.bincount((emitted[:, 0] * 4 + second).numpy(), minlength=16)
    assert chisquare(pairs, odds(torch.outer(P, Q).flatten())).pvalue > FALSE_ALARM


@pytest.mark.parametrize(
    ("wrong", "p", "q", "emitted"),
    [
        (raw_q, P, Q, [0.4286, 0.1429, 0.2857, 0.1429]),
        (retrospective, P2, Q2, [0.85, 0.15]),
        (dropping, P, Q, [0.42, 0.19, 0.26, 0.13]),
        (shared_uniform, P, Q, [0.325, 0.375, 0.2, 0.1]),
    ],
    ids=["G8", "G9", "G10", "shared_uniform"],
)
def test_the_known_wrong_algorithms_are_told_apart(wrong: Step, p: Tensor, q: Tensor, emitted: list[float]) -> None:
    counts = frequencies(wrong, p, q)
    assert chisquare(counts, odds(p)).pvalue < FALSE_ALARM
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
    u = uniforms(1_000, 2)
    u[0, 0] = 0.0
    assert first(p, q, torch.zeros(1_000, dtype=torch.long), u).tolist() == [1] * 1_000


def test_what_is_past_a_rows_length_is_not_looked_at() -> None:
    p = torch.eye(3)[[0, 1, 2]].expand(2, 3, 3)
    drawn = chain(torch.tensor([[0, 1], [0, 1]]), torch.full((2, 2, 3), 1 / 3))
    accepted, following, _ = verify_chain(p, drawn, torch.tensor([1, 2]), uniforms(2, 3))
    assert (accepted.tolist(), following.tolist()) == ([1, 2], [1, 2])


def test_without_a_proposal_the_next_token_comes_from_the_target() -> None:
    u = torch.tensor([[0.1], [0.5], [0.95]], dtype=torch.float64)
    accepted, following, _ = verify_chain(P.expand(3, 1, 4), None, torch.zeros(3, dtype=torch.long), u)
    assert (accepted.tolist(), following.tolist()) == ([0, 0, 0], [0, 1, 3])


def test_a_draw_names_no_token_of_probability_zero_at_either_end() -> None:
    weights = torch.tensor([0.0, 0.3, 0.0, 0.7, 0.0]).expand(3, -1)
    edges = torch.tensor([0.0, 0.5, 1 - 2**-53], dtype=torch.float64)
    assert draw(weights, edges).tolist() == [1, 3, 3]


def test_greedy_counts_only_the_leading_matches() -> None:
    proposed = torch.tensor([[1, 2, 3], [9, 2, 3], [1, 9, 3]])
    assert matching_prefix(proposed, torch.tensor([[1, 2, 3]]).expand(3, 3)).tolist() == [3, 0, 1]
