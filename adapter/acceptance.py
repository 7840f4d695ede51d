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
    """Proposals of S sampled rows, and what they were drawn from: q in the ratio test is exactly that (osd.md 5.3).

    Without q the tokens were chosen, by no chance at all: q is 1 at each of them.
    """

    tokens: Tensor  # [S, n] target ids
    q: Tensor | None  # [S, m, V_d]
    taken: Tensor  # [S, n]: q of each token
    to_target: Tensor | None = None  # [V_d] target ids of q's last dimension; None where V_d is V
    rows: tuple[int, ...] = ()  # the S rows' places in the batch
    source: Tensor | None = None  # int64 [S, n]: which of the m each token was drawn from; None: its own (a chain)
    replaced: bool = False  # siblings were drawn independently, and may be the same token

    @staticmethod
    def chosen(tokens: Tensor, rows: Sequence[int]) -> "Drawn":
        """Of rows whose tokens [S, n] were not drawn."""
        return Drawn(tokens, None, torch.ones(tokens.shape, device=tokens.device), rows=tuple(rows))

    def at(self, positions: Tensor, size: int, rows: Tensor | None = None) -> Tensor:
        """What one token [R] of each row, or of some rows [R], was drawn from: q [R, V] over the target's tokens."""
        each = torch.arange(len(self.tokens), device=self.tokens.device) if rows is None else rows
        if self.q is None:
            return self.taken.new_zeros(len(each), size).scatter_(1, self.tokens[each, positions][:, None], 1.0)
        q = self.q[each, positions if self.source is None else self.source[each, positions]]
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
    """The distribution [..., V] of the recovered token: normalise(max(p - q, 0)), and p where nothing is left."""
    return refused(p, q)[0]


def refused(p: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """What is left of p [..., V] after a token drawn from q was refused, and how likely [...] that is to happen.

    Nothing is left only where p = q, and there a rejection has probability 0: only rounding leads here.
    """
    rest = (p - q).clamp_min(0.0)
    mass = rest.sum(-1, keepdim=True)
    return torch.where(mass > 0, rest / mass, p), mass[..., 0]


def verify_chain(p: Tensor, drawn: Drawn | None, lengths: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Decide on sampled chains: accepted counts [S], next tokens [S], and where one was refused how likely that was.

    p [S, k + 1, V]: p[:, i] is the target's distribution before token i. uniforms [S, k + 1], all independent:
    token i is accepted with probability min(1, p/q), tested as u * q < p with the i-th; the last one draws the
    next token. The first refusal draws it from the residual; where all lengths[s] tokens of a row were accepted
    it is the bonus token, from p. Without a chain (k = 0) it is drawn from p.
    """
    accepted, k = torch.zeros_like(lengths), p.shape[1] - 1
    if drawn is not None:
        p_taken = p[:, :k].gather(-1, drawn.tokens[:, :k, None])[..., 0]
        passed = (uniforms[:, :k] * drawn.taken[:, :k] < p_taken) & (
            torch.arange(k, device=p.device) < lengths[:, None]
        )
        accepted = passed.long().cumprod(-1).sum(-1)
    weights = p[torch.arange(len(p), device=p.device), accepted]
    chance = torch.ones_like(weights[:, 0])
    if drawn is not None:
        rest, chance = refused(weights, drawn.at(accepted.clamp(max=k - 1), p.shape[-1]))
        weights = torch.where((accepted < lengths)[:, None], rest, weights)
    return accepted, draw(weights, uniforms[:, -1]), chance


def verify_siblings(
    p: Tensor, q: Tensor | None, tokens: Tensor, counts: Tensor, uniforms: Tensor, replaced: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Decide on the children of one node: which was accepted [R], -1 for none, and then the next token [R].

    Of rows that refused all of them the third result [R] is how likely that was: of drawn children the product of each
    one's chance before it was drawn, given those before it. So the mean of refusals / chance over many runs is 1.

    p [R, V] is the target's distribution at the node; tokens [R, m] its children in the order in which they are tried,
    of which counts[i] are real; uniforms [R, m + 1], all independent. Children drawn from q [R, V] one after another:
    each is held against what its predecessors left of p, and without replacement of q (recursive rejection, Jeon et
    al., arXiv 2402.14160; with replacement SpecInfer, arXiv 2305.09781, algorithm 2). Children that were chosen (q is
    None): a draw from p names one of them, or it is the next token; the same law as trying each and removing it.
    """
    if q is None:
        following = draw(p, uniforms[:, -1])
        real = torch.arange(tokens.shape[1], device=p.device) < counts[:, None]
        named = (tokens == following[:, None]) & real
        chance = (1 - (p.gather(1, tokens) * real).sum(-1)).clamp_min(0.0)
        taken = torch.where(named.any(-1), named.long().argmax(-1), -1) if tokens.shape[1] else counts - 1
        return taken, following, chance
    accepted, chance = torch.full_like(counts, -1), torch.ones_like(p[:, 0])
    for child in range(tokens.shape[1]):
        token = tokens[:, child, None]
        tried = (accepted < 0) & (child < counts)
        passed = tried & (uniforms[:, child] * q.gather(1, token)[:, 0] < p.gather(1, token)[:, 0])
        accepted = torch.where(passed, child, accepted)
        rest, mass = refused(p, q)
        out = tried & ~passed
        p, chance = torch.where(out[:, None], rest, p), torch.where(out, chance * mass, chance)
        q = q if replaced else torch.where(out[:, None], without(q, token), q)
    return accepted, draw(p, uniforms[:, -1]), chance


def without(q: Tensor, token: Tensor) -> Tensor:
    """q [R, V] given that it is not token [R, 1]; nothing where that was all there was."""
    rest = q.scatter(1, token, 0.0)
    return rest / rest.sum(-1, keepdim=True).clamp_min(torch.finfo(rest.dtype).tiny)


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
