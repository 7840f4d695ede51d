"""Records to training batches. The convention that matters: a row teaches the token *at* its position."""

from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from adapter.batch import Batch, Example, collated, example, grouped, packed, padded
from adapter.drafters.causal_lm import CausalLM
from adapter.target import Target
from storage.records import FeedbackRecord, Round
from tests.adapter.feedback import refusals
from tests.service.engine.test_families import FAMILIES

EVERYTHING = 10_000


def all_tokens(target: Target) -> torch.Tensor:
    return torch.arange(target.vocab_size)


@torch.no_grad()
def test_the_hidden_state_that_a_row_teaches_is_the_one_before_its_token(
    target: Target, answered: list[FeedbackRecord]
) -> None:
    """Held against the target itself: at the index `at`, its own logits are the row."""
    for record in answered[:4]:
        made = example(record, all_tokens(target), EVERYTHING)
        assert made is not None
        log_probs = target.model(input_ids=made.tokens[None]).logits[0, made.at].log_softmax(-1)
        torch.testing.assert_close(log_probs.gather(-1, made.ids), made.log_p[:, :-1], rtol=0.01, atol=0.01)


def test_a_row_at_the_first_output_is_taught_through_the_prompts_last_token(
    target: Target, answered: list[FeedbackRecord]
) -> None:
    record = answered[0]
    first = msgspec.structs.replace(record, temperature=1.0, teacher=record.teacher.at([0]))
    made = example(first, all_tokens(target), max_context=0)
    assert made is not None
    assert made.tokens.tolist() == [int(record.prompt[-1])]
    assert made.at.tolist() == [0]


def test_a_sequence_ends_before_its_last_trained_token(target: Target, answered: list[FeedbackRecord]) -> None:
    record = refusals(answered[0], [2, 5])
    made = example(record, all_tokens(target), EVERYTHING, "rejected")
    assert made is not None
    assert made.tokens.tolist() == record.prompt.tolist() + record.output[:5].tolist()
    assert (made.at - len(record.prompt)).tolist() == [1, 4]


def test_of_a_long_prompt_the_end_is_kept(target: Target, answered: list[FeedbackRecord]) -> None:
    made = example(answered[0], all_tokens(target), max_context=3)
    assert made is not None
    assert made.tokens[:3].tolist() == answered[0].prompt[-3:].tolist()
    assert made.at[0] == 2


def test_tokens_outside_the_draft_vocabulary_are_absent_and_their_mass_is_kept(
    target: Target, answered: list[FeedbackRecord]
) -> None:
    drafter = CausalLM.from_target(target.model, 1, torch.arange(0, target.vocab_size, 3))
    made = example(answered[0], drafter.target_to_draft, EVERYTHING)
    assert made is not None
    ids = answered[0].teacher.arrays()[1]
    assert bool(((made.ids == -1) == torch.from_numpy(ids % 3 != 0)).all())
    assert torch.allclose(made.log_p.exp().sum(-1), torch.ones(len(ids)), atol=1e-5)


def test_a_record_without_rows_gives_no_example(target: Target, answered: list[FeedbackRecord]) -> None:
    bare = msgspec.structs.replace(answered[0], temperature=1.0, teacher=answered[0].teacher.at([]))
    assert example(bare, all_tokens(target), EVERYTHING) is None


def accepted_once(record: FeedbackRecord) -> FeedbackRecord:
    """Refused at output 1, then accepted at 2 and 3 and refused at 4."""
    played = (Round(1, 1, 4, 0, -1, 0.0, 1.0, 1.0), Round(2, 1, 4, 2, -1, 0.0, 1.0, 1.0))
    return msgspec.structs.replace(record, rounds=played, teacher=record.teacher.at([1, 4]))


def test_a_position_that_was_not_refused_is_taught_the_token_that_was_emitted(
    target: Target, answered: list[FeedbackRecord]
) -> None:
    record = accepted_once(answered[0])
    made = example(record, all_tokens(target), EVERYTHING, accepted_weight=0.25)
    assert made is not None
    others = [2, 3, *range(5, len(record.output))]
    assert (made.at - len(record.prompt) + 1).tolist() == [1, 4, *others]
    assert made.weight.tolist() == [1.0, 1.0] + [0.25] * len(others)
    assert made.ids[2:, 0].tolist() == record.output[others].tolist()
    assert set(made.log_p[2:].exp().sum(-1).tolist()) == set(made.log_p[2:, 0].exp().tolist()) == {1.0}


def test_plainly_decoded_tokens_are_taught_too(target: Target, answered: list[FeedbackRecord]) -> None:
    """While the governor speculates nowhere, a drafter still learns from greedy traffic."""
    plain = msgspec.structs.replace(answered[0], rounds=(), teacher=answered[0].teacher.at([]))
    made = example(plain, all_tokens(target), EVERYTHING)
    assert made is not None
    assert (made.at - len(plain.prompt) + 1).tolist() == list(range(1, len(plain.output)))


def test_emitted_tokens_of_sampled_requests_teach_nothing(target: Target, answered: list[FeedbackRecord]) -> None:
    record = msgspec.structs.replace(accepted_once(answered[0]), temperature=1.0)
    made = example(record, all_tokens(target), EVERYTHING)
    assert made is not None
    assert (made.at - len(record.prompt) + 1).tolist() == [1, 4]


def test_as_osd_is_published_only_refused_positions_are_trained_on(
    target: Target, answered: list[FeedbackRecord]
) -> None:
    """Not the accepted ones, and not the row that was logged at a plainly decoded token."""
    record = accepted_once(answered[0])
    record = msgspec.structs.replace(record, teacher=answered[0].teacher.at([1, 4, 6]))
    made = example(record, all_tokens(target), EVERYTHING, "rejected")
    assert made is not None
    assert (made.at - len(record.prompt) + 1).tolist() == [1, 4]
    assert made.weight.tolist() == [1.0, 1.0]
    assert len(made.tokens) == len(record.prompt) + 4


def test_rows_that_were_logged_at_verified_positions_are_taken_instead_of_the_emitted_token(
    target: Target, answered: list[FeedbackRecord]
) -> None:
    record = accepted_once(answered[0])
    record = msgspec.structs.replace(record, teacher=answered[0].teacher.at([1, 2, 4]))
    made = example(record, all_tokens(target), EVERYTHING, accepted_weight=0.5)
    assert made is not None
    assert (made.at - len(record.prompt) + 1).tolist()[:4] == [1, 2, 4, 3]
    assert made.weight.tolist()[:4] == [1.0, 0.5, 1.0, 0.5]
    assert bool((made.log_p[1, :-1].exp() > 0).sum() > 1)  # the target's row
    assert bool((made.log_p[3, :-1].exp() > 0).sum() == 1)  # the emitted token


def test_rows_of_sampled_requests_at_accepted_positions_are_trained_on(
    target: Target, answered: list[FeedbackRecord]
) -> None:
    record = msgspec.structs.replace(
        accepted_once(answered[0]), temperature=1.0, teacher=answered[0].teacher.at([1, 2, 4])
    )
    made = example(record, all_tokens(target), EVERYTHING)
    assert made is not None
    assert (made.at - len(record.prompt) + 1).tolist() == [1, 2, 4]


def test_without_a_weight_a_position_that_was_not_refused_is_left_out(
    target: Target, answered: list[FeedbackRecord]
) -> None:
    made = example(accepted_once(answered[0]), all_tokens(target), EVERYTHING, accepted_weight=0.0)
    assert made is not None
    assert (made.at - len(answered[0].prompt) + 1).tolist() == [1, 4]


def made_up(lengths: list[int]) -> list[Example]:
    """Examples that can be told apart by their first token; two columns or three."""
    return [
        Example(
            tokens=torch.full((n,), i),
            at=torch.tensor([n - 1]),
            ids=torch.full((1, 2 + i % 2), i),
            log_p=torch.full((1, 3 + i % 2), -float(i)),
            weight=torch.tensor([float(i)]),
        )
        for i, n in enumerate(lengths)
    ]


def batches(examples: list[Example], size: int, seed: int = 0, packing: bool = False) -> list[Batch]:
    generator = torch.Generator().manual_seed(seed)
    return [collated(group, packing) for group in grouped(examples, size, generator, packing)]


def taught(batch: Batch) -> list[int]:
    """The examples in a batch."""
    return batch.tokens.flatten()[batch.at].tolist()


@pytest.mark.parametrize("packing", [False, True])
def test_every_example_is_in_each_pass_once_and_batches_keep_to_their_size(packing: bool) -> None:
    lengths = np.random.default_rng(0).integers(5, 60, size=40).tolist()
    found = batches(made_up(lengths), 200, packing=packing)
    assert all(batch.tokens.numel() <= 200 for batch in found)
    assert sorted(i for batch in found for i in taught(batch)) == list(range(40))


def test_packed_batches_hold_no_padding() -> None:
    lengths = np.random.default_rng(0).integers(5, 60, size=40).tolist()
    found = batches(made_up(lengths), 200, packing=True)
    assert sum(batch.tokens.numel() for batch in found) == sum(lengths)


def test_packed_examples_restart_their_positions_and_keep_their_rows() -> None:
    batch = packed(made_up([3, 1, 2]))
    assert batch.tokens.tolist() == [[0, 0, 0, 1, 2, 2]]
    assert batch.positions is not None
    assert batch.positions.tolist() == [[0, 1, 2, 0, 0, 1]]
    assert batch.at.tolist() == [2, 3, 5]
    assert taught(batch) == [0, 1, 2]


def test_a_sequence_longer_than_the_batch_size_has_a_batch_of_its_own() -> None:
    found = batches(made_up([5, 500, 5]), 100)
    assert sorted(batch.tokens.shape[0] for batch in found) == [1, 2]


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("seed", [1, 2])
def test_the_order_depends_on_the_seed_alone(seed: int, packing: bool) -> None:
    examples = made_up([10] * 12)
    first, second, other = ([taught(b) for b in batches(examples, 30, s, packing)] for s in (seed, seed, seed + 10))
    assert first == second
    assert first != other


@pytest.mark.parametrize("family", ["qwen2_sliding", "gpt_neox", "gemma3"])
def test_packed_sequences_do_not_see_each_other_in_any_standard_decoder(family: str) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(FAMILIES[family]).float().eval()
    drafter = CausalLM.from_target(model, 2, torch.arange(320))
    examples = [
        replace(made, tokens=torch.randint(1, 320, made.tokens.shape, generator=torch.Generator().manual_seed(n)))
        for n, made in enumerate(made_up([30, 1, 17, 20]))
    ]
    together = packed(examples)
    found = drafter.hidden(together.tokens, together.positions)[0].split([30, 1, 17, 20])
    for e, hidden in zip(examples, found, strict=True):
        torch.testing.assert_close(hidden, drafter.hidden(e.tokens[None])[0], rtol=1e-4, atol=1e-5)


def test_padding_keeps_rows_and_the_bucket_in_their_columns() -> None:
    batch = padded(made_up([3, 5]))
    assert batch.at.tolist() == [2, 9]
    assert batch.tokens.flatten()[batch.at].tolist() == [0, 1]
    assert batch.ids.tolist() == [[0, 0, -1], [1, 1, 1]]
    assert batch.weight.tolist() == [0.0, 1.0]
    assert batch.log_p[0].tolist() == [0.0, 0.0, -float("inf"), 0.0]
