"""N-grams in the engine: in place of a drafter, before a learned one, and for sampled rows."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from threading import Thread

import pytest
import torch

from adapter.drafters.ngram import Ngram
from adapter.drafters.protocol import Drafter, Shape
from adapter.policy import Policy
from adapter.target import Target
from service.engine import lookups
from service.engine.engine import Engine
from service.engine.lookups import Lookup
from service.engine.ngrams import WAITING, Ngrams
from service.engine.shapes import Shapes
from service.engine.survival import RowClass
from tests.adapter.conditioned import CONDITIONED, first, shaken
from tests.service.engine.oracle import ask, first_layers, plain_greedy, random_prompt, running
from tests.service.engine.small import LENGTH, PROMPT, exact, p_value, small_target
from tests.service.engine.test_trees import row_of

FALSE_ALARM = 1e-6


def settled(engine: Engine) -> None:
    assert engine._speculation._ngrams is not None
    engine._speculation._ngrams.drain()


@pytest.mark.parametrize("nodes", [0, 8], ids=["chain", "tree"])
def test_as_the_fallback_they_speed_up_what_was_said_before(target: Target, nodes: int) -> None:
    """The second time the whole output is known."""
    prompt = random_prompt(target, 3)
    with running(target, fallback="ngram", tree_nodes=nodes) as engine:
        once = ask(engine, prompt, 40, workload="w")
        assert once.wait() == ask(engine, prompt, 40, draft_length=0).wait()
        settled(engine)
        again = ask(engine, prompt, 40, workload="w")
        assert again.wait() == once.wait()
    accepted = [sum(r.accepted for r in client.usage.rounds) for client in (once, again)]
    assert accepted[1] > 15
    assert accepted[1] > accepted[0]
    assert {r.version for r in again.usage.rounds} == {0}


def test_by_default_nothing_stands_in_for_a_drafter(target: Target) -> None:
    with running(target) as engine:
        assert ask(engine, [5, 6, 7] * 8, 30).usage.rounds == ()


def test_as_a_drafter_they_are_swapped_in_like_any_other(target: Target) -> None:
    ngram = Ngram(target.vocab_size, torch.device("cpu"))
    prompts = [random_prompt(target, seed, 6) * 3 for seed in range(4)]
    with running(target, ngram, draft_length=4) as engine:
        clients = [ask(engine, prompt, 60) for prompt in prompts]
        for number, drafter in enumerate((first_layers(target), ngram, first(target, "eagle"), ngram), start=2):
            engine.swap(number, drafter).result(timeout=30)
        outputs = [client.wait() for client in clients]
        assert engine.lanes.faults == 0
    assert outputs == [plain_greedy(target, prompt, 60) for prompt in prompts]


@pytest.mark.parametrize("form", [Shape.chain(4), Shape(14, 15, 4)], ids=["chain", "tree"])
@pytest.mark.parametrize("kind", ["causal_lm", "medusa"])
def test_a_long_match_goes_before_the_drafters_own(target: Target, kind: str, form: Shape) -> None:
    """Rounds of the match are version 0's, and the others the drafter's; no token changes."""
    drafter = first_layers(target, layers=1) if kind == "causal_lm" else first(target, kind)
    prompts = [random_prompt(target, seed, 8) for seed in range(3)]
    shapes = Shapes.of(4, 0, ngram_first=True)
    beside = next(k for k in range(shapes.choices) if shapes.lookup(k) == Lookup(form, Shape.chain(4)))
    with running(target, drafter, governed=True, ngram_first=True) as engine:
        engine._speculation._pace._chosen = lambda asked: beside  # type: ignore[method-assign]
        before = [ask(engine, prompt, 40).wait() for prompt in prompts]
        settled(engine)
        clients = [ask(engine, prompt, 40) for prompt in prompts]
        assert [client.wait() for client in clients] == before
        rounds = [r for client in clients for r in client.usage.rounds]
        assert engine.lanes.faults == 0
    assert {r.version for r in rounds} == {0, 1}
    looked_up = [r for r in rounds if r.version == 0]
    assert sum(r.accepted for r in looked_up) > 0.9 * sum(r.proposed for r in looked_up)
    assert max(r.proposed for r in looked_up) == form.depth
    assert before == [plain_greedy(target, prompt, 40) for prompt in prompts]


@contextmanager
def joined_rounds(target: Target, drafter: Drafter, longest: int, nodes: int, **config: float) -> Iterator[Engine]:
    """An engine that plays rounds of matches and a drafter together, and no other ones."""
    shapes = Shapes.of(longest, nodes, ngram_first=True)
    joined = next(k for k in range(shapes.choices) if (one := shapes.lookup(k)) and one.joined)
    with running(
        target, drafter, governed=True, ngram_first=True, draft_length=longest, tree_nodes=nodes, **config
    ) as engine:
        engine._speculation._pace._chosen = lambda asked: joined  # type: ignore[method-assign]
        yield engine
        assert engine.lanes.faults == 0


@pytest.mark.parametrize("nodes", [0, 15], ids=["chain", "tree"])
@pytest.mark.parametrize("kind", ["causal_lm", *CONDITIONED])
def test_in_one_tree_with_a_drafters_proposal_they_change_no_token(target: Target, kind: str, nodes: int) -> None:
    """Of outputs that are half known: where the match is wrong the drafter may be right, and both are told apart."""
    drafter = first_layers(target, layers=1) if kind == "causal_lm" else shaken(first(target, kind))
    prompts = [random_prompt(target, seed, 8) for seed in range(3)]
    with joined_rounds(target, drafter, 4, nodes) as engine:
        before = [ask(engine, prompt, 12).wait() for prompt in prompts]
        settled(engine)
        clients = [ask(engine, prompt, 40) for prompt in prompts]
        clients += [ask(engine, prompt, 40, Policy(1.0), seed=7) for prompt in prompts]
        outputs = [client.wait() for client in clients]
        rounds = [r for client in clients for r in client.usage.rounds]
    with running(target) as engine:
        seeded = [ask(engine, prompt, 40, Policy(1.0), seed=7).wait() for prompt in prompts]
    assert outputs[:3] == [plain_greedy(target, prompt, 40) for prompt in prompts]
    assert [output[:12] for output in outputs[:3]] == before
    assert outputs[3:] == seeded
    assert {r.version for r in rounds} == {0, 1}


def test_where_matches_mislead_the_drafter_beside_them_is_still_accepted(target: Target) -> None:
    """Each pair of the text was followed by something else before."""
    prompt, drafter = random_prompt(target, 3), first_layers(target, layers=2)
    text = plain_greedy(target, prompt, 40)
    with joined_rounds(target, drafter, 4, 15) as engine:
        ngrams = engine._speculation._ngrams
        assert ngrams is not None
        assert ngrams.recent is not None
        for pair in pairwise(text):
            ngrams.recent.insert("default", [*pair, *range(2, 8)])
        client = ask(engine, prompt, 40)
        assert client.wait() == text
    misled = [r for r in client.usage.rounds if r.version == 0]
    assert len(misled) > 5
    assert sum(r.accepted for r in misled) > 0.3 * len(misled)
    assert engine._speculation._pace._governor is not None
    matches = engine._speculation._pace._governor._survival._matches
    assert matches.cumulative(RowClass("default", "greedy", match="short"))[0] < 0.2


@pytest.mark.parametrize("nodes", [0, 7], ids=["chain", "tree"])
def test_sampled_rows_follow_the_targets_distribution(target: Target, nodes: int) -> None:
    """2,000 outputs of four tokens, chi-squared at 1e-6; the prompts are repetitive, so that there are matches."""
    small, policy = small_target(target), Policy(1.0)
    with running(
        small, fallback="ngram", slots=64, draft_length=3, context=16, waiting=3000, tree_nodes=nodes
    ) as engine:
        for _ in range(50):
            ask(engine, PROMPT, LENGTH, policy).wait()
        settled(engine)
        clients = [ask(engine, PROMPT, LENGTH, policy) for _ in range(2000)]
        outputs = [tuple(client.wait()) for client in clients]
        rounds = [r for client in clients for r in client.usage.rounds]
    assert p_value(outputs, exact(small, policy)) > FALSE_ALARM
    assert len(rounds) > 0


@pytest.mark.parametrize("form", [Shape.chain(3), Shape(14, 15, 4)], ids=["chain", "tree"])
def test_so_do_sampled_rows_whose_matches_go_before_their_drafter(
    target: Target, form: Shape, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same bound, with matches that count as long and rows without one in a batch."""
    monkeypatch.setattr(lookups, "SURE", 2)  # outputs of four tokens have no longer ones
    small, policy = small_target(target), Policy(1.0)
    shapes = Shapes.of(3, 0, ngram_first=True)
    beside = next(k for k in range(shapes.choices) if shapes.lookup(k) == Lookup(form, Shape.chain(3)))
    drafter = first_layers(small, layers=1, vocabulary=small.vocab_size)
    with running(
        small, drafter, governed=True, ngram_first=True, slots=64, draft_length=3, context=16, waiting=3000
    ) as engine:
        engine._speculation._pace._chosen = lambda asked: beside  # type: ignore[method-assign]
        for _ in range(50):
            ask(engine, PROMPT, LENGTH, policy).wait()
        settled(engine)
        clients = [ask(engine, PROMPT, LENGTH, policy) for _ in range(2000)]
        outputs = [tuple(client.wait()) for client in clients]
        versions = {r.version for client in clients for r in client.usage.rounds}
        assert engine.lanes.faults == 0
    assert p_value(outputs, exact(small, policy)) > FALSE_ALARM
    assert versions == {0, 1}


@pytest.mark.parametrize("nodes", [0, 7], ids=["chain", "tree"])
def test_and_those_that_share_rounds_with_trees_of_both(target: Target, nodes: int) -> None:
    """The same bound; greedy rows in the batch have such trees."""
    small, policy = small_target(target), Policy(1.0)
    drafter = first_layers(small, layers=1, vocabulary=small.vocab_size)
    with joined_rounds(small, drafter, 3, nodes, slots=64, context=16, waiting=3000) as engine:
        for _ in range(50):
            ask(engine, PROMPT, LENGTH, policy).wait()
        settled(engine)
        clients = [(ask(engine, PROMPT, LENGTH, policy), ask(engine, PROMPT, LENGTH)) for _ in range(1400)]
        outputs = [tuple(sampled.wait()) for sampled, _ in clients]
        greedy = {tuple(other.wait()) for _, other in clients}
    assert p_value(outputs, exact(small, policy)) > FALSE_ALARM
    assert greedy == {tuple(plain_greedy(small, PROMPT, LENGTH))}


def test_where_they_fail_decoding_goes_on_without_them(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object) -> None:
        raise RuntimeError("no n-grams today")

    monkeypatch.setattr(Ngram, "propose", broken)
    prompt = random_prompt(target, 3)
    with running(target, fallback="ngram") as engine:
        assert ask(engine, prompt, 20).wait() == ask(engine, prompt, 20).wait()
        assert engine.lanes.faults == 1


def test_matches_that_cannot_be_looked_up_cost_no_request(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object, **kwargs: object) -> None:
        raise RuntimeError("no n-grams today")

    monkeypatch.setattr(Ngram, "found", broken)
    prompt = random_prompt(target, 3)
    with running(target, first_layers(target), governed=True, ngram_first=True) as engine:
        client = ask(engine, prompt, 20)
        assert client.wait() == plain_greedy(target, prompt, 20)
        assert engine.lanes.faults == 1
        assert {r.version for r in ask(engine, prompt, 20).usage.rounds} <= {1}


def test_outputs_that_come_too_fast_are_left_out_and_counted(target: Target) -> None:
    ngrams = Ngrams.of(target.vocab_size, target.device, 1024)
    ngrams._thread = Thread()  # one that takes nothing in
    row = row_of(target, [5, 6])
    for _ in range(WAITING + 7):
        ngrams.finished(row.generation)
    assert ngrams.left_out == 7
