"""The interval of a paired gain, by drawing whole requests again (the cluster bootstrap)."""

from statistics import NormalDist

import numpy as np
import numpy.typing as npt

RESAMPLES = 2000
NORMAL = NormalDist()


def paired_gain(sums: npt.NDArray[np.float64], confidence: float, seed: int) -> tuple[float, float]:
    """(low, high) of the gain in acceptance probability, two-sided at `confidence`.

    sums [n, 3]: for each request the weight of its positions, and the parent's and the candidate's weighted
    sums of acceptance probabilities. The gain of a resample is its ratio of sums, as in the whole. (0, 0)
    without requests, and (-1, 1) with one, which says nothing. Resamples of few requests vary too little, so
    quantiles further out are taken, as far as Student's interval is wider than the normal one (Hesterberg,
    arXiv 1411.5279, section 3.2.3).
    """
    n = len(sums)
    if n < 2:
        return (-1.0, 1.0) if n else (0.0, 0.0)
    generator = np.random.default_rng(seed)
    counts = generator.multinomial(n, np.full(n, 1 / n), size=RESAMPLES)
    weight, parent, candidate = (counts @ sums).T
    outside = NORMAL.cdf(-widening(n, confidence))
    gains = (candidate - parent) / np.where(weight > 0, weight, 1.0)
    low, high = np.quantile(gains, [outside, 1 - outside])
    return float(low), float(high)


def widening(n: int, confidence: float) -> float:
    """How many of the bootstrap's own standard errors the interval of n requests reaches to each side."""
    return float(np.sqrt(n / (n - 1))) * student(confidence, n - 1)


def student(confidence: float, freedom: int) -> float:
    """Student's two-sided quantile, by the Cornish-Fisher series: within 1 % from 3 degrees of freedom on."""
    z = NORMAL.inv_cdf((1 + confidence) / 2)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3


def detectable(low: float, high: float, n: int, confidence: float, power: float = 0.8) -> float:
    """The true gain whose lower bound would lie above 0 with that probability, by the spread of an interval."""
    if n < 2:
        return 1.0
    reach = widening(n, confidence)
    return (reach + NORMAL.inv_cdf(power)) * (high - low) / (2 * reach)
