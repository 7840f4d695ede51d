"""The acceptance rule and the figures that follow from it: one spelling, used by serving and by evaluation.

p is the target's distribution and q the drafter's, both after the same processing of the request's policy.
Chain verification is that of Leviathan et al. (arXiv 2211.17192) and Chen et al. (arXiv 2302.01318): the
emitted tokens are distributed exactly as p, whatever q is.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Drawn:
    """Chains of S sampled rows, and what they were drawn from: q in the ratio test is exactly that (osd.md 5.3)."""

    tokens: Tensor  # [S, k] target ids
    q: Tensor  # [S, k, V_d]
    taken: Tensor  # [S, k]: q of each token
    to_target: Tensor | None = None  # [V_d] target ids of q's last dimension; None where V_d is V

    def at(self, positions: Tensor, size: int) -> Tensor:
        """q [S, V] at one position [S] of each chain, over the target's vocabulary of `size`."""
        q = self.q[torch.arange(len(self.q), device=self.q.device), positions]
        if self.to_target is None:
            return q
        return q.new_zeros(len(q), size).scatter_(1, self.to_target.expand(len(q), -1), q)


def draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    """One token a row [R] from weights [R, V] of any positive sum, by inverse CDF at uniforms [R] in [0, 1)."""
    reached = weights.double().cumsum(-1)
    total = reached[:, -1]
    # Rounding must not lift a draw to the total: nothing lies past it.
    wanted = torch.minimum(uniforms * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(reached, wanted[:, None], right=True)[:, 0]


def residual(p: Tensor, q: Tensor) -> Tensor:
    """The distribution [..., V] of the recovered token: normalise(max(p - q, 0)), and p where nothing is left.

    Nothing is left only where p = q, and there a rejection has probability 0: only rounding leads here.
    """
    rest = (p - q).clamp_min(0.0)
    mass = rest.sum(-1, keepdim=True)
    return torch.where(mass > 0, rest / mass, p)


def verify_chain(p: Tensor, drawn: Drawn | None, lengths: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Decide on sampled chains: accepted counts [S] and next tokens [S].

    p [S, k + 1, V]: p[:, i] is the target's distribution before token i. uniforms [S, k + 1], all independent:
    token i is accepted with probability min(1, p/q), tested as u * q < p with the i-th; the last one draws the
    next token. The first refusal draws it from the residual; where all lengths[s] tokens of a row were accepted
    it is the bonus token, from p. Without a chain (k = 0) it is drawn from p.
    """
    accepted = torch.zeros_like(lengths)
    if drawn is not None:
        k = drawn.tokens.shape[1]
        p_taken = p[:, :k].gather(-1, drawn.tokens[..., None])[..., 0]
        passed = (uniforms[:, :k] * drawn.taken < p_taken) & (torch.arange(k, device=p.device) < lengths[:, None])
        accepted = passed.long().cumprod(-1).sum(-1)
    weights = p[torch.arange(len(p), device=p.device), accepted]
    if drawn is not None:
        q = drawn.at(accepted.clamp(max=k - 1), p.shape[-1])
        weights = torch.where((accepted < lengths)[:, None], residual(weights, q), weights)
    return accepted, draw(weights, uniforms[:, -1])


def matching_prefix(proposed: Tensor, choices: Tensor) -> Tensor:
    """Greedy and seeded verification: how many leading tokens of proposed [B, k] equal choices [B, k]; [B]."""
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
