"""Slow plain decoding under any policy that has one answer: what greedy and seeded requests are held against."""

import torch

from adapter.policy import Policy
from adapter.seeded import exponential
from adapter.target import Target
from tests.adapter.slow_sampling import adjusted, distribution


def plain(target: Target, prompt: list[int], policy: Policy, max_tokens: int, seed: int | None = None) -> list[int]:
    """One full forward a token, no memory, no drafter, one request."""
    output: list[int] = []
    with torch.inference_mode():
        while len(output) < max_tokens:
            logits = target.model(input_ids=torch.tensor([prompt + output])).logits[0, -1]
            output.append(_next(logits, prompt, output, policy, seed))
            if output[-1] in target.eos_ids:
                break
    return output


def _next(logits: torch.Tensor, prompt: list[int], output: list[int], policy: Policy, seed: int | None) -> int:
    if policy.greedy:
        return int(adjusted(logits, policy, prompt, output).argmax())
    assert seed is not None, "an unseeded request has no one answer"
    noise = exponential(seed, len(output), len(logits)).numpy()
    return int((distribution(logits, policy, prompt, output) / noise).argmax())
