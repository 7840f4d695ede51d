"""Exact verification of trees, against the golden vectors of the literature study and against known wrong algorithms.

Draws are 20,000 a test with a fixed seed, held against the exact law by a chi-squared test at 1e-6: were the seeds
free, a right algorithm would raise some ten false alarms in a million runs of this file. Acceptance is held against
the vectors within five standard deviations (0.0177 at a half).
"""

from collections.abc import Callable
from math import sqrt

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor

from adapter import tree_acceptance
from adapter.acceptance import Drawn, draw, residual, verify_siblings, without
from adapter.policy import Policy
from adapter.sampling import Sampler
from adapter.tree_acceptance import verify_tree

RUNS = 20_000
FALSE_ALARM = 1e-6
P = torch.tensor([0.4, 0.3, 0.2, 0.1])
Q = torch.tensor([0.1, 0.2, 0.3, 0.4])
G3 = [0.6, 0.72, 0.768, 0.7912]
G4 = [0.6, 0.7642857, 0.8402976, 1.0]
G5 = {1: (0.1, (4 / 9, 3 / 9, 2 / 9, 0.0)), 2: (0.3, (4 / 7, 3 / 7, 0.0, 0.0)), 3: (0.6, (1.0, 0.0, 0.0, 0.0))}


def uniforms(*shape: int, seed: int = 20260101) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def children(m: int, replaced: bool) -> Tensor:
    """RUNS times m children drawn from Q, one after another."""
    u, q, drawn = uniforms(RUNS, m, seed=1), Q.expand(RUNS, -1), []
    for i in range(m):
        drawn.append(draw(q, u[:, i]))
        q = q if replaced else without(q, drawn[-1][:, None])
    return torch.stack(drawn, 1)


def decide(tokens: Tensor, q: Tensor | None, replaced: bool = False) -> tuple[Tensor, Tensor]:
    """Whether a child was accepted, and the emitted token, in each run."""
    runs, m = tokens.shape
    many = None if q is None else q.expand(runs, -1)
    counts = torch.full((runs,), m)
    accepted, following, _ = verify_siblings(P.expand(runs, -1), many, tokens, counts, uniforms(runs, m + 1), replaced)
    named = tokens.gather(1, accepted.clamp_min(0)[:, None])[:, 0]
    return accepted >= 0, torch.where(accepted >= 0, named, following)


def follows_p(tokens: Tensor, p: Tensor = P) -> bool:
    counts, expected = np.bincount(tokens.numpy(), minlength=len(p)), (p.double() / p.double().sum()).numpy()
    assert counts[expected == 0].sum() == 0
    kept = expected > 0
    return kept.sum() == 1 or bool(chisquare(counts[kept], expected[kept] * len(tokens)).pvalue > FALSE_ALARM)


def near(share: float, expected: float) -> bool:
    return abs(share - expected) < 5 * sqrt(max(expected * (1 - expected), 1e-9) / RUNS) + 1e-9


@pytest.mark.parametrize("m", [1, 2, 3, 4])
def test_g4_children_without_replacement(m: int) -> None:
    accepted, emitted = decide(children(m, replaced=False), Q)
    assert near(accepted.double().mean().item(), G4[m - 1])
    assert follows_p(emitted)


@pytest.mark.parametrize("m", [1, 2, 3, 4])
def test_g3_children_with_replacement(m: int) -> None:
    accepted, emitted = decide(children(m, replaced=True), Q, replaced=True)
    assert near(accepted.double().mean().item(), G3[m - 1])
    assert follows_p(emitted)


@pytest.mark.parametrize("m", [1, 2, 3])
def test_g5_chosen_children(m: int) -> None:
    chosen = Q.topk(m).indices.expand(RUNS, -1)
    accepted, emitted = decide(chosen, None)
    probability, rest = G5[m]
    assert near(accepted.double().mean().item(), probability)
    assert follows_p(emitted)
    assert follows_p(emitted[~accepted], torch.tensor(rest))


def test_the_residual_of_a_chosen_child_is_p_without_it() -> None:
    chosen = Drawn.chosen(torch.tensor([[3]]), [0])
    q = chosen.at(torch.tensor([0]), 4)
    assert residual(P[None], q)[0].tolist() == pytest.approx([4 / 9, 3 / 9, 2 / 9, 0.0])


@pytest.mark.parametrize("drawn_with", [True, False])
def test_children_held_against_the_wrong_q_are_told_apart(drawn_with: bool) -> None:
    """Drawn with replacement and verified as without, and the other way round."""
    assert not follows_p(decide(children(3, replaced=drawn_with), Q, replaced=not drawn_with)[1])


def test_the_best_of_some_drawn_children_alone_is_told_apart() -> None:
    """Drops what the drafter finds less likely, after it was drawn."""
    best = children(2, replaced=False).max(1, keepdim=True).values
    assert not follows_p(decide(best, Q)[1])


@pytest.mark.parametrize("noise", [0.5, 1.0])
@pytest.mark.parametrize("m", [1, 2, 4])
def test_drawn_children_are_accepted_more_than_the_likeliest_ones(m: int, noise: float) -> None:
    """Over 4,000 contexts of 60 tokens at temperature 1, by a drafter that is somewhat off: why trees draw them."""
    generator, runs = torch.Generator().manual_seed(2), 4_000
    z = 2 * torch.randn(runs, 60, generator=generator)
    p, q = z.softmax(-1), (z + noise * torch.randn(runs, 60, generator=generator)).softmax(-1)
    rest, drawn, u = q, [], uniforms(runs, m, seed=4)
    for i in range(m):
        drawn.append(draw(rest, u[:, i]))
        rest = without(rest, drawn[-1][:, None])
    accepted, _, _ = verify_siblings(p, q, torch.stack(drawn, 1), torch.full((runs,), m), uniforms(runs, m + 1, seed=5))
    likeliest = p.gather(1, q.topk(m).indices).sum(1).mean().item()
    assert (accepted >= 0).double().mean().item() > likeliest + 5 * 0.5 / sqrt(runs)


def sampled(runs: int, seed: int = 5) -> list[Sampler]:
    return [Sampler(Policy(1.0), [1], [], torch.Generator().manual_seed(seed * runs + i)) for i in range(runs)]


def grown(roots: Tensor, below: Tensor) -> tuple[Tensor, Tensor, Drawn]:
    """Trees of two children, and two under the first of them, drawn one after another from `roots` and `below` [V]."""
    runs, u, nodes = 4_000, uniforms(4_000, 4, seed=9), []
    for q, at in ((roots, 0), (below, 2)):
        first = draw(q.expand(runs, -1), u[:, at])
        nodes += [first, draw(without(q.expand(runs, -1), first[:, None]), u[:, at + 1])]
    tokens, parents = torch.stack(nodes, 1), torch.tensor([-1, -1, 0, 0]).expand(runs, -1)
    q = torch.stack([roots, below]).expand(runs, -1, -1)
    source = torch.tensor([0, 0, 1, 1]).expand(runs, -1)
    taken = q.gather(1, source[..., None].expand(-1, -1, 4)).gather(2, tokens[..., None])[..., 0]
    return tokens, parents, Drawn(tokens, q, taken, rows=tuple(range(runs)), source=source)


def emitted(decided: list[tuple[list[int], int]], tokens: Tensor) -> list[list[int]]:
    return [[*tokens[i, path].tolist(), following] for i, (path, following) in enumerate(decided)]


def walked(walks: Callable[[Tensor], list[tuple[list[int], int]]]) -> tuple[np.ndarray, np.ndarray]:
    """How often each pair of tokens was emitted, and what the target says; a third is drawn where only one came out."""
    after = torch.stack([P.roll(i) for i in range(4)])  # the target's distribution depends on the token before
    tokens, _, _ = grown(Q, P.flip(0))
    logits = torch.cat([P.log().expand(len(tokens), 1, -1), after.log()[tokens]], dim=1)
    pairs, u = np.zeros(16), uniforms(len(tokens), seed=3)
    for i, output in enumerate(emitted(walks(logits), tokens)):
        second = output[1] if len(output) > 1 else int(draw(after[output[0]][None], u[i : i + 1]))
        pairs[output[0] * 4 + second] += 1
    return pairs, (P[:, None] * after).double().flatten().numpy() * len(tokens)


def test_a_walk_down_drawn_trees_emits_sequences_distributed_as_the_target() -> None:
    tokens, parents, drawn = grown(Q, P.flip(0))
    samplers = sampled(len(tokens))
    pairs, expected = walked(lambda logits: verify_tree(samplers, [4] * len(tokens), tokens, parents, [drawn], logits))
    assert chisquare(pairs, expected * pairs.sum() / expected.sum()).pvalue > FALSE_ALARM


def test_a_walk_down_chosen_trees_does_so_too() -> None:
    tokens, parents, _ = grown(Q, P.flip(0))
    samplers = sampled(len(tokens))
    pairs, expected = walked(lambda logits: verify_tree(samplers, [4] * len(tokens), tokens, parents, [], logits))
    assert chisquare(pairs, expected * pairs.sum() / expected.sum()).pvalue > FALSE_ALARM


def test_a_walk_that_takes_drawn_children_for_chosen_ones_by_the_drafters_taste_is_told_apart() -> None:
    """Typical acceptance: the first child of some probability is taken, whatever the chances."""

    def lenient(
        p: Tensor, q: Tensor | None, tokens: Tensor, counts: Tensor, u: Tensor, replaced: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        accepted, following, chance = verify_siblings(p, q, tokens, counts, u, replaced)
        likely = (p.gather(1, tokens[:, :1])[:, 0] > 0.05) & (counts > 0) if tokens.shape[1] else counts < 0
        return torch.where(likely, 0, accepted), following, chance

    tokens, parents, drawn = grown(Q, P.flip(0))
    samplers = sampled(len(tokens))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tree_acceptance, "verify_siblings", lenient)
        pairs, expected = walked(
            lambda logits: verify_tree(samplers, [4] * len(tokens), tokens, parents, [drawn], logits)
        )
    assert chisquare(pairs, expected * pairs.sum() / expected.sum()).pvalue < FALSE_ALARM


TOKENS = torch.tensor([[5, 6, 7, 8, 9, 3]])
PARENTS = torch.tensor([[-1, -1, 0, 1, 1, 4]])  # 5 -> 7, and 6 -> 8 or 9 -> 3


def after(*choices: int) -> Tensor:
    """Logits [1, 7, 12] by which the target's own choices after the last token and each node are these."""
    return torch.nn.functional.one_hot(torch.tensor(choices), 12).float()[None]


def greedy(logits: Tensor, lengths: int = 6) -> tuple[list[int], int]:
    return verify_tree([Sampler(Policy(0.0), [1], [])], [lengths], TOKENS, PARENTS, [], logits)[0]


def test_a_greedy_row_walks_to_where_the_target_leaves_the_tree() -> None:
    assert greedy(after(6, 0, 9, 0, 0, 3, 11)) == ([1, 4, 5], 11)
    assert greedy(after(6, 0, 9, 0, 0, 2, 11)) == ([1, 4], 2)
    assert greedy(after(4, 0, 9, 0, 0, 3, 11)) == ([], 4)


def test_what_is_past_a_rows_length_is_not_looked_at() -> None:
    assert greedy(after(6, 0, 9, 0, 0, 3, 11), lengths=4) == ([1], 9)


def test_a_seeded_row_takes_the_same_tokens_down_any_tree() -> None:
    logits = torch.randn(1, 1, 12, generator=torch.Generator().manual_seed(0)).expand(1, 7, -1)
    plain, output = [], list[int]()
    for _ in range(4):
        sampler = Sampler(Policy(1.0), [1], output, seed=4)
        ((_, token),) = verify_tree([sampler], [0], TOKENS[:, :0], PARENTS[:, :0], [], logits[:, :1])
        plain.append(token)
        output = [*plain]
    tree = torch.tensor([[plain[0], 10, plain[1], plain[2], 11, 11]])
    parents = torch.tensor([[-1, -1, 0, 2, 2, 3]])
    ((path, following),) = verify_tree([Sampler(Policy(1.0), [1], [], seed=4)], [6], tree, parents, [], logits)
    assert [*tree[0, path].tolist(), following] == plain


class AfterSeven:
    """Allows only 4 once a 7 stands on the path, and writes down what it was asked."""

    def __init__(self) -> None:
        self.asked: list[list[int]] = []

    def allowed(self, drafted: list[int]) -> Tensor:
        self.asked.append(list(drafted))
        return torch.arange(12) == 4 if 7 in drafted else torch.ones(12, dtype=torch.bool)

    def commit(self, tokens: list[int]) -> None:
        raise AssertionError("nothing is committed here")


@pytest.mark.parametrize("policy", [Policy(0.0), Policy(0.5)], ids=["greedy", "sampled"])
def test_a_constraint_is_asked_along_the_path_alone(policy: Policy) -> None:
    constraint = AfterSeven()
    sampler = Sampler(policy, [1], [], constraint=constraint)  # type: ignore[arg-type]
    logits = 90 * after(5, 7, 0, 3, 0, 0, 0)
    assert verify_tree([sampler], [6], TOKENS, PARENTS, [], logits) == [([0, 2], 4)]
    assert constraint.asked == [[], [5], [5, 7]]


def test_penalties_count_the_path_and_not_the_rest_of_the_tree() -> None:
    penalised = Sampler(Policy(0.0, presence_penalty=1.0), [1], [])
    logits = torch.zeros(1, 7, 12)
    logits[0, 0, 5] = logits[0, 1, 7] = 3.0
    logits[0, 3, 5], logits[0, 3, 6] = 2.0, 1.5  # 5 is on the path: 1.0 against 1.5
    assert verify_tree([penalised], [6], TOKENS, PARENTS, [], logits) == [([0, 2], 6)]
