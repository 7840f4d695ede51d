"""The interval of a paired gain, by drawing whole requests again (the cluster bootstrap)."""

import numpy as np
import numpy.typing as npt

RESAMPLES = 2000


def paired_gain(sums: npt.NDArray[np.float64], confidence: float, seed: int) -> tuple[float, float]:
    """(low, high) of the gain in acceptance probability, two-sided at `confidence`.

    sums [n, 3]: for each request the weight of its positions, and the parent's and the candidate's weighted
    sums of acceptance probabilities. The gain of a resample is its ratio of sums, as in the whole. (0, 0)
    without requests.
    """
    if not len(sums):
        return 0.0, 0.0
    generator = np.random.default_rng(seed)
    counts = generator.multinomial(len(sums), np.full(len(sums), 1 / len(sums)), size=RESAMPLES)
    weight, parent, candidate = (counts @ sums).T
    outside = (1 - confidence) / 2
    low, high = np.quantile((candidate - parent) / weight, [outside, 1 - outside])
    return float(low), float(high)
