"""Choosing and verifying, batched: three kinds of rows side by side, and none that another row changes."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from adapter.acceptance import Drawn
from adapter.policy import Policy
from adapter.processing import DraftVocabulary
from adapter.sampling import Sampler, choose, sampled_rows, verify
from adapter.seeded import exponential

SIZE, K = 40, 3
GREEDY = Policy(0.0)
EVEN = DraftVocabulary(torch.arange(0, SIZE, 2), torch.arange(SIZE).where(torch.arange(SIZE) % 2 == 0, -2) // 2)


def random_logits(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 3


def sampler(policy: Policy, seed: int | None = None, **options: object) -> Sampler:
    generator = torch.Generator().manual_seed(99)
    return Sampler(policy, [1, 2], [5, 5, 7], generator, seed, **options)  # type: ignore[arg-type]


def kinds() -> dict[str, Sampler]:
    penalties = {"repetition_penalty": 1.5, "frequency_penalty": 0.5, "logit_bias": ((3, 2.0),)}
    return {
        "greedy": sampler(GREEDY),
        "sampled": sampler(Policy(0.8, top_p=0.9)),
        "seeded": sampler(Policy(0.8, top_k=20), seed=3),
        "greedy_penalised": sampler(Policy(0.0, **penalties)),  # type: ignore[arg-type]
        "sampled_penalised": sampler(Policy(1.0, **penalties)),  # type: ignore[arg-type]
        "seeded_penalised": sampler(Policy(1.0, **penalties), seed=4),  # type: ignore[arg-type]
    }


def propose(
    samplers: Sequence[Sampler], logits: Tensor, vocabulary: DraftVocabulary
) -> tuple[Tensor, tuple[Drawn, ...]]:
    """Chains [B, K] chosen from a drafter's logits [B, K, V_d]."""
    tokens, qs, taken = torch.empty(len(samplers), 0, dtype=torch.long), [], []
    rows = sampled_rows(samplers)
    for step in range(K):
        chosen, q = choose(samplers, logits[:, step], tokens, vocabulary)
        tokens = torch.cat([tokens, vocabulary.to_target[chosen][:, None]], dim=1)
        if q is not None:
            qs.append(q)
            taken.append(q.gather(1, chosen[rows, None])[:, 0])
    if not rows:
        return tokens, ()
    q, of_token = torch.stack(qs, 1), torch.stack(taken, 1)
    return tokens, (Drawn(tokens[rows], q, of_token, vocabulary.to_target, tuple(rows)),)


def played(samplers: Sequence[Sampler], target: Tensor, drafter: Tensor) -> list[tuple[list[int], tuple[int, int]]]:
    """A round: the proposal and the decision of each row."""
    tokens, drawn = propose(samplers, drafter, EVEN)
    return list(zip(tokens.tolist(), verify(samplers, [K] * len(samplers), tokens, drawn, target), strict=True))


@pytest.mark.parametrize("seed", range(20))
def test_a_rows_round_is_the_same_alone_and_in_a_batch(seed: int) -> None:
    target, drafter = random_logits(6, K + 1, SIZE, seed=seed), random_logits(6, K, SIZE // 2, seed=seed + 100)
    drafter += target[:, :K, EVEN.to_target]
    together = played(list(kinds().values()), target, drafter)
    alone = [played([row], target[i : i + 1], drafter[i : i + 1])[0] for i, row in enumerate(kinds().values())]
    assert together == alone


@pytest.mark.parametrize("kind", kinds())
def test_a_drafter_with_the_targets_logits_is_always_right(kind: str) -> None:
    everything = DraftVocabulary(torch.arange(SIZE), torch.arange(SIZE))
    for seed in range(20):
        row, target = [kinds()[kind]], random_logits(1, K + 1, SIZE, seed=seed)
        tokens, drawn = propose(row, target[:, :K], everything)
        assert verify(row, [K], tokens, drawn, target)[0][0] == K


def test_a_seeded_draft_is_right_where_the_targets_choice_is_a_draft_token() -> None:
    """Over every second token: the common noise of a draft token is that of its target token."""
    in_reach = 0
    for seed in range(60):
        row, target = [sampler(Policy(0.7), seed=seed)], random_logits(1, K + 1, SIZE, seed=seed)
        tokens, _ = propose(row, target[:, :K, EVEN.to_target], EVEN)
        accepted, following = verify(row, [K], tokens, (), target)[0]
        in_reach += accepted
        assert accepted == K or following % 2 == 1
    assert in_reach > 30


def test_a_seeded_row_takes_the_likeliest_token_under_the_noise_of_its_output_position() -> None:
    logits = random_logits(1, K + 1, SIZE)
    tokens = torch.stack([(row.softmax(-1) / exponential(6, 3 + i, SIZE)).argmax() for i, row in enumerate(logits[0])])
    row = sampler(Policy(1.0), seed=6)
    assert verify([row], [K], tokens[None, :K], (), logits) == [(K, int(tokens[K]))]
    wrong = tokens.clone()
    wrong[1] = (tokens[1] + 1) % SIZE
    assert verify([row], [K], wrong[None, :K], (), logits) == [(1, int(tokens[1]))]


def test_temperature_zero_is_greedy_even_with_a_seed() -> None:
    row = sampler(GREEDY, seed=1)
    assert not row.seeded
    assert not row.sampled


def test_an_unseeded_row_gets_numbers_of_its_own() -> None:
    ours, theirs = Sampler(Policy(), [1], []), Sampler(Policy(), [1], [])
    assert not torch.equal(ours.uniforms(4), theirs.uniforms(4))


class Odd:
    """Allows odd tokens, and after a drafted 7 only 9; writes down what it was asked."""

    def __init__(self) -> None:
        self.asked: list[list[int]] = []
        self.committed: list[int] = []

    def allowed(self, drafted: Sequence[int]) -> Tensor:
        self.asked.append(list(drafted))
        return torch.arange(SIZE) == 9 if 7 in drafted else torch.arange(SIZE) % 2 == 1

    def commit(self, tokens: Sequence[int]) -> None:
        self.committed += tokens


@pytest.mark.parametrize("policy", [GREEDY, Policy(1.5)], ids=["greedy", "sampled"])
def test_a_constraint_is_asked_at_each_position_what_may_follow_the_tokens_drafted_before(policy: Policy) -> None:
    row = sampler(policy, constraint=Odd())
    drawn = Drawn(torch.tensor([[7, 9, 8]]), torch.full((1, K, SIZE), 1e-9), torch.full((1, K), 1e-9), rows=(0,))
    logits = torch.zeros(1, K + 1, SIZE)
    logits[0, 0, 7] = 9.0
    decided = verify([row], [2], drawn.tokens, (drawn,), logits)
    assert decided == [(2, 9)]
    assert row.constraint.asked == [[], [7], [7, 9]]  # type: ignore[union-attr]


def test_padding_is_not_looked_at() -> None:
    rows, logits = [kinds()["greedy_penalised"], kinds()["seeded_penalised"]], random_logits(2, K + 1, SIZE)
    tokens = torch.zeros(2, K, dtype=torch.long)
    assert verify(rows, [0, 0], tokens, (), logits) == verify(rows, [0, 0], tokens[:, :0], (), logits[:, :1])


def test_what_is_committed_reaches_the_constraint() -> None:
    constraint = Odd()
    sampler(GREEDY, constraint=constraint).commit([3, 5])
    sampler(GREEDY).commit([3, 5])
    assert constraint.committed == [3, 5]


def test_logits_are_left_as_they_were() -> None:
    logits = random_logits(6, K + 1, SIZE)
    before = logits.clone()
    played(list(kinds().values()), logits, logits[:, :K, EVEN.to_target])
    assert torch.equal(logits, before)
