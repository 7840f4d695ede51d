"""Common noise: right in distribution, and a function of seed and position alone.

Chi-squared tests at 1e-6 with fixed seeds: were they free, a right generator would fail once in a million runs.
"""

import numpy as np
import torch
from scipy.stats import chisquare, kstest

from adapter.seeded import CommonNoise, exponential

FALSE_ALARM = 1e-6
CPU = torch.device("cpu")


def test_the_noise_is_exponential_and_never_zero() -> None:
    noise = torch.cat([exponential(seed, 0, 50_000) for seed in range(20)]).numpy()
    assert kstest(noise, "expon").pvalue > FALSE_ALARM
    assert noise.min() > 0.0


def test_the_smallest_numbers_are_as_rare_as_they_should_be() -> None:
    """In float32 a share of 1e-7 would be 0, and such a token would win whatever its probability."""
    smallest = [exponential(seed, 1, 50_000).min().item() for seed in range(400)]
    assert kstest(np.array(smallest) * 50_000, "expon").pvalue > FALSE_ALARM


def test_the_likeliest_under_noise_is_distributed_as_the_probabilities() -> None:
    probs = torch.tensor([0.5, 0.25, 0.2, 0.05, 0.0])
    counts = np.bincount([int((probs / exponential(seed, 3, 5)).argmax()) for seed in range(20_000)], minlength=5)
    assert counts[4] == 0
    assert chisquare(counts[:4], probs[:4].double().numpy() / probs.double().sum().item() * 20_000).pvalue > FALSE_ALARM


def test_positions_and_seeds_that_are_close_share_no_noise() -> None:
    places = [(seed, position) for seed in range(30) for position in range(30)]
    assert len({exponential(seed, position, 4).numpy().tobytes() for seed, position in places}) == len(places)


def test_two_positions_of_a_seed_are_independent() -> None:
    pairs = np.array([[float(exponential(seed, at, 1) > 0.6931) for at in (4, 5)] for seed in range(8_000)])
    cells = np.bincount((pairs @ [2, 1]).astype(int), minlength=4)
    assert chisquare(cells).pvalue > FALSE_ALARM


def test_noise_does_not_depend_on_what_was_asked_for_before() -> None:
    ahead, late = CommonNoise(5), CommonNoise(5)
    first = ahead.at(range(2, 6), 9, CPU)
    assert torch.equal(first[1:], ahead.at(range(3, 6), 9, CPU))
    assert torch.equal(first[3:], late.at(range(5, 6), 9, CPU))


def test_noise_is_made_once_as_long_as_its_position_is_not_over() -> None:
    noise = CommonNoise(5)
    kept = noise.at(range(3, 4), 9, CPU, over=2) is not None and noise._kept[3]
    noise.at(range(4, 6), 9, CPU, over=2)
    assert noise._kept[3] is kept
    noise.at(range(6, 7), 9, CPU, over=4)
    assert sorted(noise._kept) == [4, 5, 6]


def test_any_integer_is_a_seed() -> None:
    seeds = [0, -1, 2**63, -(2**62), 2**64 - 2]
    assert len({CommonNoise(seed).at(range(1), 4, CPU).numpy().tobytes() for seed in seeds}) == len(seeds)
