"""The acceptance rule and the figures that follow from it: one spelling, used by serving and by evaluation.

p is the target's distribution and q the drafter's, both after the same processing of the request's policy.
Chain verification is that of Leviathan et al. (arXiv 2211.17192) and Chen et al. (arXiv 2302.01318): the
emitted tokens are distributed exactly as p, whatever q is.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from adapter.policy import Policy


def distribution(logits: Tensor, policy: Policy) -> Tensor:
    """Logits [..., V] to the probabilities [..., V] that `policy` samples from (float32).

    Temperature, then top-k, then top-p (the smallest set whose mass reaches top_p). Greedy is a point mass
    on the argmax, never a softmax at a small temperature.
    """
    if policy.greedy:
        return torch.zeros_like(logits, dtype=torch.float32).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
    scaled = logits.float() / policy.temperature
    if 0 < policy.top_k < scaled.shape[-1]:
        floor = scaled.topk(policy.top_k, dim=-1).values[..., -1:]
        scaled = scaled.masked_fill(scaled < floor, float("-inf"))
    probs = scaled.softmax(-1)
    if policy.top_p < 1.0:
        ordered, order = probs.sort(dim=-1, descending=True)
        before = ordered.cumsum(-1) - ordered
        kept = ordered.masked_fill(before >= policy.top_p, 0.0)
        probs = torch.zeros_like(probs).scatter_(-1, order, kept)
        probs = probs / probs.sum(-1, keepdim=True)
    return probs


def draw(probs: Tensor, generator: torch.Generator | None) -> int:
    """One token from probabilities [V]."""
    return int(torch.multinomial(probs, 1, generator=generator).item())


def residual(p: Tensor, q: Tensor) -> Tensor:
    """The distribution [V] of the recovered token: normalise(max(p - q, 0)), and p where nothing is left.

    Nothing is left only where p = q, and there a rejection has probability 0: only rounding leads here.
    """
    rest = (p - q).clamp_min(0.0)
    mass = rest.sum()
    return rest / mass if mass > 0 else p


def verify_chain(p: Tensor, q: Tensor, proposed: Sequence[int], generator: torch.Generator | None) -> tuple[int, int]:
    """Decide on a sampled chain: (accepted count, next token).

    p [k + 1, V], q [k, V]: the drafter's token i was drawn from q[i]; p[i] is the target's distribution
    before it. Token i is accepted with probability min(1, p/q), tested as u * q < p. The first refusal draws
    the recovered token from the residual; with no refusal the bonus token comes from p[k].
    """
    for i, token in enumerate(proposed):
        u = torch.rand((), generator=generator)
        if not bool(u * q[i, token] < p[i, token]):
            return i, draw(residual(p[i], q[i]), generator)
    return len(proposed), draw(p[len(proposed)], generator)


def matching_prefix(proposed: Tensor, choices: Tensor) -> Tensor:
    """Greedy verification: how many leading tokens of proposed [B, k] equal choices [B, k]; [B]."""
    return (proposed == choices).long().cumprod(-1).sum(-1)


def acceptance_probability(p: Tensor, q: Tensor) -> Tensor:
    """sum(min(p, q)) over the last dimension: 1 - TV(p, q), the chance that a token drawn from q is accepted."""
    return torch.minimum(p, q).sum(-1)


def expected_length(alpha: float, k: int) -> float:
    """Acceptance length of k proposals accepted independently with probability alpha (2211.17192, eq. 1)."""
    return float(k + 1) if alpha == 1.0 else (1 - alpha ** (k + 1)) / (1 - alpha)


def expected_speed_up(alpha: float, k: int, cost: float) -> float:
    """Speed against plain decoding where a draft step costs `cost` target steps (2211.17192, theorem 3.8)."""
    return expected_length(alpha, k) / (k * cost + 1)


@dataclass(frozen=True)
class Acceptance:
    """Counts of some rounds, and the three figures that they give. Keep them apart, and k beside each."""

    rounds: int = 0
    proposed: int = 0
    accepted: int = 0
    histogram: tuple[int, ...] = ()  # rounds by accepted count

    @staticmethod
    def of(rounds: Sequence[tuple[int, int]]) -> "Acceptance":
        """From (proposed, accepted) pairs, one a round."""
        counts = [0] * (1 + max((proposed for proposed, _ in rounds), default=0))
        for _, accepted in rounds:
            counts[accepted] += 1
        return Acceptance(len(rounds), sum(p for p, _ in rounds), sum(a for _, a in rounds), tuple(counts))

    @property
    def rate(self) -> float:
        """Acceptance rate: accepted / proposed."""
        return self.accepted / self.proposed if self.proposed else 0.0

    @property
    def length(self) -> float:
        """Acceptance length: 1 + accepted / rounds."""
        return 1.0 + self.accepted / self.rounds if self.rounds else 1.0

    @property
    def survival(self) -> tuple[float, ...]:
        """By position j = 1..k: the share of rounds that accepted at least j tokens. Their sum is length - 1."""
        k = len(self.histogram)
        return tuple(sum(self.histogram[j:]) / self.rounds for j in range(1, k)) if self.rounds else ()
