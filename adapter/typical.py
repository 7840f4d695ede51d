"""Typical acceptance, which is LOSSY: only where a request asks for it and the server's settings allow it.

The rule of Medusa (Cai et al., arXiv 2401.10774, 2.3.1): a proposed token is accepted where the target finds it
typical, p(x) > min(epsilon, delta exp(-H(p))), H being the entropy of p; and of a tree the longest path of such tokens,
of equally long ones the likeliest, as in the published code. No chance is involved and q has no say, so what is emitted
is not distributed as p, and a drafter can steer it.

The next token is drawn from p, as plain decoding draws it; the paper takes the likeliest there. So where the rule
accepts nothing the output is exactly plain decoding's. At temperature 0 p is one token, the only one that can be
typical: there the engine verifies as ever.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import log

import torch
from torch import Tensor

from adapter.acceptance import draw
from storage.config import setting


@dataclass(frozen=True)
class Typical:
    """The rule's two thresholds; the defaults are the paper's."""

    epsilon: float = 0.09  # what is likelier is accepted, whatever the entropy
    delta: float = 0.3  # share of exp(-H), the probability of a token among as many equals as p has choices

    def __post_init__(self) -> None:
        if not 0.0 < self.epsilon <= 1.0 or not self.delta > 0.0:
            raise ValueError(
                f"typical acceptance: epsilon must lie above 0 and at most at 1, and delta above 0, "
                f"not {self.epsilon} and {self.delta}"
            )


@dataclass(frozen=True)
class TypicalConfig:
    """Whether requests may ask for typical acceptance, and what it then accepts."""

    typical_acceptance: bool = setting(
        False, "LOSSY: let requests ask for typical acceptance (X-Redraft-Acceptance: typical), which changes the text"
    )
    typical_epsilon: float = setting(
        Typical.epsilon, "typical acceptance: probability above which a token is accepted anyway"
    )
    typical_delta: float = setting(
        Typical.delta, "typical acceptance: share of exp(-entropy) above which a token is accepted"
    )

    def __post_init__(self) -> None:
        Typical(self.typical_epsilon, self.typical_delta)  # raises for thresholds that mean nothing

    @property
    def rule(self) -> Typical | None:
        """None where it is not served."""
        return Typical(self.typical_epsilon, self.typical_delta) if self.typical_acceptance else None


def thresholds(p: Tensor, rules: Sequence[Typical]) -> Tensor:
    """What a token's probability must exceed at each position [S, n] of p [S, n, V]; row i under rules[i]."""
    epsilon, delta = (
        torch.tensor(values, device=p.device)[:, None]
        for values in ([rule.epsilon for rule in rules], [rule.delta for rule in rules])
    )
    return torch.minimum(epsilon, delta * torch.exp(-torch.special.entr(p).sum(-1)))


def verify_typical_chain(
    p: Tensor, tokens: Tensor, lengths: Tensor, rules: Sequence[Typical], uniforms: Tensor
) -> tuple[Tensor, Tensor]:
    """Decide on chains: accepted counts [S] and next tokens [S].

    p [S, k + 1, V]: p[:, i] is the target's distribution before token i of tokens [S, k], of which lengths[s] are real;
    uniforms [S] draw the next tokens.
    """
    k = tokens.shape[1]
    taken = p[:, :k].gather(-1, tokens[..., None])[..., 0]
    passed = (taken > thresholds(p[:, :k], rules)) & (torch.arange(k, device=p.device) < lengths[:, None])
    accepted = passed.long().cumprod(-1).sum(-1)
    return accepted, draw(p[torch.arange(len(p), device=p.device), accepted], uniforms)


def verify_typical_tree(
    p: Tensor, tokens: Tensor, parents: Tensor, lengths: Sequence[int], rules: Sequence[Typical], uniforms: Tensor
) -> list[tuple[list[int], int]]:
    """Decide on trees: the accepted nodes and the next token of each row.

    p [S, n + 1, V]: the target's distribution after each row's last token, and after each node; tokens and parents
    [S, n], of which lengths[s] are real.
    """
    rows = torch.arange(len(p), device=p.device)
    taken = p[rows[:, None], parents + 1, tokens]
    passed = taken > thresholds(p, rules).gather(1, parents + 1)
    columns = zip(parents.tolist(), taken.tolist(), passed.tolist(), lengths, strict=True)
    paths = [_longest(above[:n], likely[:n], typical[:n]) for above, likely, typical, n in columns]
    ends = torch.tensor([path[-1] + 1 if path else 0 for path in paths], device=p.device)
    return list(zip(paths, draw(p[rows, ends], uniforms).tolist(), strict=True))


def _longest(parents: Sequence[int], likely: Sequence[float], typical: Sequence[bool]) -> list[int]:
    """The longest path of typical tokens, of equally long ones the likeliest; parents stand before their children."""
    reached: dict[int, tuple[int, float]] = {-1: (0, 0.0)}  # depth and log-probability of the nodes that may be taken
    for node, parent in enumerate(parents):
        if typical[node] and parent in reached:
            depth, value = reached[parent]
            reached[node] = depth + 1, value + log(likely[node])
    node, path = max(reached, key=reached.__getitem__), []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path[::-1]
