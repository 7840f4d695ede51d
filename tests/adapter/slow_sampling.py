"""The slow, obvious way from logits to probabilities, one position at a time, which processing is held against."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from adapter.policy import Policy

Floats = npt.NDArray[np.float64]


def adjusted(logits: torch.Tensor, policy: Policy, prompt: Sequence[int] = (), output: Sequence[int] = ()) -> Floats:
    """Logits [V] after `prompt` and `output` with bias and penalties."""
    found = logits.double().numpy().copy()
    for token, bias in policy.logit_bias:
        found[token] += bias
    for token in {*prompt, *output}:
        above = found[token] > 0
        found[token] *= 1 / policy.repetition_penalty if above else policy.repetition_penalty
    for token, times in Counter(output).items():
        found[token] -= policy.frequency_penalty * times + policy.presence_penalty
    return found


def distribution(
    logits: torch.Tensor, policy: Policy, prompt: Sequence[int] = (), output: Sequence[int] = ()
) -> Floats:
    """What one token after `prompt` and `output` is drawn from, [V]."""
    scaled = adjusted(logits, policy, prompt, output)
    if policy.greedy:
        return np.eye(len(scaled))[scaled.argmax()]
    probs = _normal(np.exp((scaled - scaled.max()) / policy.temperature))
    order = np.argsort(-probs, kind="stable")
    if policy.top_k:
        probs = _only(probs, order[: policy.top_k])
    if policy.top_p < 1.0:
        before = probs[order].cumsum() - probs[order]
        probs = _only(probs, order[before < policy.top_p])
    return _only(probs, np.flatnonzero(probs >= policy.min_p * probs.max()))


def _only(probs: Floats, kept: npt.NDArray[np.intp]) -> Floats:
    cut = np.zeros_like(probs)
    cut[kept] = probs[kept]
    return _normal(cut)


def _normal(weights: Floats) -> Floats:
    total: Floats = weights / weights.sum()
    return total
