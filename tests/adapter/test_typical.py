"""Typical acceptance: the rule on vectors worked out by hand, and that only the rows that ask for it know of it."""

from collections.abc import Sequence
from math import exp, log

import pytest
import torch
from torch import Tensor

from adapter import sampling, tree_acceptance
from adapter.policy import Policy
from adapter.sampling import Sampler, verify
from adapter.tree_acceptance import verify_tree
from adapter.typical import Typical, TypicalConfig, thresholds, verify_typical_chain, verify_typical_tree

RULE = Typical()
PLAINLY = Policy(1.0)
NEVER_TYPICAL = Typical(1.0, 1e9)  # no probability exceeds 1
SHARP = (0.7, 0.2, 0.1)  # H = 0.8018, 0.3 exp(-H) = 0.1346: the bound of 0.09 is the lower one
SURER = (0.9, 0.06, 0.04)
FLAT = (0.02,) * 50  # H = ln 50, 0.3 / 50 = 0.006


def p_of(*rows: Sequence[float]) -> Tensor:
    """Distributions over as many tokens as the longest has: [1, n, V]."""
    size = max(map(len, rows))
    return torch.tensor([[*row, *([0.0] * (size - len(row)))] for row in rows])[None]


def half(count: int = 1) -> Tensor:
    return torch.full((count,), 0.5, dtype=torch.float64)


@pytest.mark.parametrize(
    ("p", "expected"),
    [
        (SHARP, 0.09),
        (FLAT, 0.006),
        ((1.0, 0.0), 0.09),  # min(0.09, 0.3)
        ((0.25, 0.25, 0.25, 0.25), 0.075),  # 0.3 / 4
        (SURER, 0.09),
    ],
)
def test_the_threshold_is_the_lower_of_the_bound_and_the_entropys(p: Sequence[float], expected: float) -> None:
    entropy = -sum(x * log(x) for x in p if x)
    assert expected == pytest.approx(min(0.09, 0.3 * exp(-entropy)), rel=1e-3)
    assert thresholds(p_of(p), [RULE]).item() == pytest.approx(expected, rel=1e-3)


def test_each_row_has_its_own_rule() -> None:
    found = thresholds(p_of(SHARP).expand(2, 1, -1), [RULE, Typical(0.5, 0.5)])[:, 0].tolist()
    assert found == pytest.approx([0.09, 0.5 * 0.44852], rel=1e-3)


@pytest.mark.parametrize(
    ("p", "token", "accepted"),
    [(SHARP, 0, 1), (SHARP, 1, 1), (SHARP, 2, 1), (SURER, 0, 1), (SURER, 1, 0), (SURER, 2, 0), (FLAT, 49, 1)],
)
def test_a_token_is_accepted_where_it_is_typical(p: Sequence[float], token: int, accepted: int) -> None:
    both = p_of(p, p)
    count, _ = verify_typical_chain(both, torch.tensor([[token]]), torch.tensor([1]), [RULE], half())
    assert count.tolist() == [accepted]


def test_a_chain_ends_at_the_first_token_that_is_not_and_the_next_one_is_drawn_from_p_there() -> None:
    p, tokens = p_of(SHARP, SURER, SHARP, (0.0, 1.0, 0.0)), torch.tensor([[2, 2, 0]])
    count, following = verify_typical_chain(p, tokens, torch.tensor([3]), [RULE], half())
    assert (count.tolist(), following.tolist()) == ([1], [0])  # from SURER, at one half
    count, following = verify_typical_chain(p, torch.tensor([[2, 0, 1]]), torch.tensor([3]), [RULE], half())
    assert (count.tolist(), following.tolist()) == ([3], [1])


def test_what_is_past_a_rows_length_is_not_looked_at() -> None:
    p = p_of(SHARP, SHARP, SHARP)
    count, _ = verify_typical_chain(p, torch.tensor([[0, 0]]), torch.tensor([1]), [RULE], half())
    assert count.tolist() == [1]
    assert verify_typical_tree(p, torch.tensor([[0, 0]]), torch.tensor([[-1, 0]]), [1], [RULE], half())[0][0] == [0]


def walk(p: Tensor, tokens: list[int], parents: list[int]) -> list[int]:
    ((path, _),) = verify_typical_tree(
        p, torch.tensor([tokens]), torch.tensor([parents]), [len(tokens)], [RULE], half()
    )
    return path


def test_the_longest_path_wins_and_not_the_likeliest_beginning() -> None:
    p = p_of(SHARP, SURER, SHARP, SHARP)  # after 0 nothing but 0 is typical, after 1 everything
    assert walk(p, [0, 1, 1], [-1, -1, 0]) == [0]  # 1 after 0 is none
    assert walk(p_of(SHARP, SURER, SHARP, SHARP, SHARP), [0, 1, 1, 2], [-1, -1, 0, 1]) == [1, 3]


def test_of_equally_long_paths_the_likeliest_wins() -> None:
    p = p_of(SHARP, SHARP, SHARP, SHARP, SHARP)
    assert walk(p, [2, 1, 0, 0], [-1, -1, 0, 1]) == [1, 3]
    assert walk(p, [1, 0, 1, 2], [-1, -1, 0, 1]) == [1, 3]  # 0.7 * 0.1 against 0.2 * 0.2
    assert walk(p, [1, 0, 0, 2], [-1, -1, 0, 1]) == [0, 2]  # 0.7 * 0.1 against 0.2 * 0.7


def lenient(seed: int, rule: Typical = RULE, policy: Policy = PLAINLY) -> Sampler:
    return Sampler(policy, [1], [], torch.Generator().manual_seed(seed), typical=rule)


POLICIES = [Policy(1.0), Policy(0.6), Policy(1.5, top_k=4), Policy(1.0, top_p=0.8), Policy(1.0, presence_penalty=1.5)]


def proposals(count: int, nodes: int = 6) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    logits = 1.2 * torch.randn(count, nodes + 1, 8, generator=generator)
    tokens = torch.rand(count, 8, generator=generator).argsort(-1)[:, :nodes]  # siblings are different
    return logits, tokens, torch.tensor([-1, -1, 0, 1, 1, 4]).expand(count, -1)


def test_a_batch_decides_as_each_row_alone_does_on_chains_and_trees() -> None:
    count = 40
    logits, tokens, parents = proposals(count)
    policies = [POLICIES[i % len(POLICIES)] for i in range(count)]
    lengths = [i % 7 for i in range(count)]
    accepted = set()
    for tree in (False, True):

        def decide(rows: list[int], tree: bool = tree) -> list[tuple[object, int]]:
            samplers = [lenient(i, policy=policies[i]) for i in rows]
            if tree:
                return list(
                    verify_tree(samplers, [lengths[i] for i in rows], tokens[rows], parents[rows], [], logits[rows])
                )
            return list(verify(samplers, [lengths[i] for i in rows], tokens[rows], [], logits[rows]))

        together = decide(list(range(count)))
        assert together == [decide([i])[0] for i in range(count)]
        accepted |= {len(found) if isinstance(found, list) else found for found, _ in together}
    assert {0, 1, 2, 3} <= accepted


def test_a_tree_that_is_a_chain_is_decided_as_the_chain() -> None:
    logits, tokens, _ = proposals(30)
    chain = torch.arange(6).expand(30, -1) - 1
    trees = verify_tree([lenient(i) for i in range(30)], [6] * 30, tokens, chain, [], logits)
    chains = verify([lenient(i) for i in range(30)], [6] * 30, tokens, [], logits)
    assert [(len(path), following) for path, following in trees] == chains


def test_where_no_token_can_be_typical_a_round_is_plain_decoding() -> None:
    logits, tokens, parents = proposals(30)
    plain = verify([lenient(i) for i in range(30)], [0] * 30, tokens[:, :0], [], logits[:, :1])
    assert plain == verify([lenient(i, NEVER_TYPICAL) for i in range(30)], [6] * 30, tokens, [], logits)
    trees = verify_tree([lenient(i, NEVER_TYPICAL) for i in range(30)], [6] * 30, tokens, parents, [], logits)
    assert trees == [([], following) for _, following in plain]


@pytest.mark.parametrize("policy", [Policy(0.0), Policy(1.0, top_k=1)], ids=["greedy", "one_token"])
def test_where_one_token_is_all_there_is_the_decision_is_the_exact_one(policy: Policy) -> None:
    """At temperature 0, and under a policy that leaves one token."""
    logits, tokens, parents = proposals(200)
    exact = [Sampler(policy, [1], [], torch.Generator().manual_seed(i)) for i in range(200)]
    typical = [lenient(i, policy=policy) for i in range(200)]
    for samplers in (exact, typical):
        assert not any(sampler.lenient for sampler in samplers) or not policy.greedy
    found = verify_tree(typical, [6] * 200, tokens, parents, [], logits)
    assert found == verify_tree(exact, [6] * 200, tokens, parents, [], logits)
    assert {len(path) for path, _ in found} >= {0, 1, 2}, "some of each"
    assert verify(typical, [6] * 200, tokens, [], logits) == verify(exact, [6] * 200, tokens, [], logits)


def test_more_is_accepted_than_exactly() -> None:
    logits, tokens, _ = proposals(300)
    exact = [Sampler(PLAINLY, [1], [], torch.Generator().manual_seed(i)) for i in range(300)]
    typical = [lenient(i) for i in range(300)]
    accepted = [sum(n for n, _ in verify(rows, [6] * 300, tokens, [], logits)) for rows in (exact, typical)]
    assert accepted[1] > 2 * accepted[0] > 0


def test_rows_that_did_not_ask_are_decided_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside lenient rows in one batch, and with a rule that nobody could call."""
    logits, tokens, parents = proposals(60)

    def samplers(mixed: bool) -> list[Sampler]:
        kinds = [Policy(0.0), Policy(1.0), Policy(0.7, top_p=0.9)]
        made = [Sampler(kinds[i % 3], [1], [], torch.Generator().manual_seed(i)) for i in range(60)]
        return [lenient(i) if mixed and i % 2 else sampler for i, sampler in enumerate(made)]

    beside = [verify(samplers(True), [6] * 60, tokens, [], logits)[i] for i in range(0, 60, 2)]
    beside_trees = [verify_tree(samplers(True), [6] * 60, tokens, parents, [], logits)[i] for i in range(0, 60, 2)]
    monkeypatch.setattr(sampling, "verify_typical_chain", None)
    monkeypatch.setattr(tree_acceptance, "verify_typical_tree", None)
    assert beside == verify(samplers(False), [6] * 60, tokens, [], logits)[::2]
    assert beside_trees == verify_tree(samplers(False), [6] * 60, tokens, parents, [], logits)[::2]


class NeverTwice:
    """Allows no token that was drafted before."""

    def allowed(self, drafted: Sequence[int]) -> Tensor:
        allowed = torch.ones(8, dtype=torch.bool)
        allowed[list(drafted)] = False
        return allowed

    def commit(self, tokens: Sequence[int]) -> None:
        raise AssertionError("nothing is committed here")


def test_what_a_constraint_forbids_on_a_path_is_never_typical_there() -> None:
    flat = torch.zeros(1, 5, 8)
    sampler = Sampler(Policy(1.0), [1], [], constraint=NeverTwice(), typical=RULE)
    tokens, parents = torch.tensor([[3, 3, 4, 4]]), torch.tensor([[-1, 0, 1, 0]])
    ((path, _),) = verify_tree([sampler], [4], tokens, parents, [], flat)
    assert path == [0, 3]  # 3 after 3 is forbidden, and all below it with it
    assert verify([sampler], [4], tokens, [], flat)[0][0] == 1


def test_a_seed_and_typical_acceptance_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="depends on no drafter"):
        Sampler(Policy(1.0), [1], [], seed=3, typical=RULE)


@pytest.mark.parametrize(("epsilon", "delta"), [(0.0, 0.3), (1.1, 0.3), (0.09, 0.0), (float("nan"), 0.3)])
def test_thresholds_that_mean_nothing_are_refused(epsilon: float, delta: float) -> None:
    with pytest.raises(ValueError, match="epsilon must lie"):
        TypicalConfig(True, epsilon, delta)


def test_it_is_off_unless_the_server_is_told_to_allow_it() -> None:
    assert TypicalConfig().rule is None
    assert TypicalConfig(typical_acceptance=True).rule == Typical(0.09, 0.3)
