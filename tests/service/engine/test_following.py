"""Drafters that follow the target's hidden states, in the engine: their kinds, gaps, swaps, and what a row keeps."""

import gc
from collections.abc import Iterator

import pytest
import torch
from transformers.cache_utils import DynamicCache

from adapter.drafters.layer import LayerDrafter
from adapter.drafters.learnt import LearntDrafter
from adapter.drafters.protocol import Shape
from adapter.masks import additive
from adapter.policy import Policy
from adapter.taps import Taps
from adapter.target import Target
from service.engine import attention
from service.engine.following import Shown, reading
from service.engine.lookups import NOTHING
from service.engine.residents import Resident
from service.engine.rounds import Plan, play, read_prompt
from service.engine.slots import Slots
from tests.adapter.conditioned import CONDITIONED, Server, first, shaken
from tests.service.engine.oracle import ask, check_swaps, first_layers, plain_greedy, random_prompt, running
from tests.service.engine.test_trees import row_of

SHAPES = {"chain": Shape.chain(3), "tree": Shape(3, 9, 3)}


@pytest.fixture(params=CONDITIONED)
def drafter(request: pytest.FixtureRequest, target: Target) -> LearntDrafter:
    return shaken(first(target, request.param, depths=3))


@pytest.mark.parametrize("nodes", [0, 9], ids=["chain", "tree"])
@pytest.mark.parametrize("chunk", [3, 64])
def test_greedy_output_equals_plain_output(target: Target, drafter: LearntDrafter, nodes: int, chunk: int) -> None:
    prompts = [random_prompt(target, seed, 2 + 7 * seed) for seed in range(5)]
    with running(target, drafter, slots=3, draft_length=3, tree_nodes=nodes, prefill_chunk=chunk) as engine:
        clients = [ask(engine, prompt, 20 + i) for i, prompt in enumerate(prompts)]
        outputs = [client.wait() for client in clients]
        assert all(client.usage.rounds for client in clients)
    assert outputs == [plain_greedy(target, prompt, 20 + i) for i, prompt in enumerate(prompts)]


@pytest.mark.parametrize("nodes", [0, 9], ids=["chain", "tree"])
def test_a_requests_rounds_are_the_same_alone_batched_and_read_in_pieces(
    target: Target, drafter: LearntDrafter, nodes: int
) -> None:
    """So its drafter has seen the same, whatever else was going on."""
    prompt, said = random_prompt(target, 3, 17), []
    for slots, chunk in ((1, 64), (1, 4), (4, 5)):
        with running(target, drafter, slots=slots, draft_length=3, tree_nodes=nodes, prefill_chunk=chunk) as engine:
            others = [ask(engine, random_prompt(target, s, 5 * s + 1), 30, draft_length=s) for s in range(slots - 1)]
            client = ask(engine, prompt, 40)
            said.append([(r.start, r.proposed, r.accepted, r.rejected_token) for r in client.usage.rounds])
            for other in others:
                other.wait()
    assert said[0] == said[1] == said[2]


class Rig:
    """One row, its memory, and a drafter that follows it."""

    def __init__(self, target: Target, drafter: LearntDrafter, prompt: list[int]) -> None:
        attention.install(target.model)
        if drafter.decoder is not None:
            attention.install(drafter.decoder)
        self.target, self.slots = target, Slots(target.model.get_decoder(), 1, 120)
        memory = None if drafter.decoder is None or drafter.rides else Slots(drafter.decoder, 1, 120)
        self.resident, self.row = Resident(1, drafter, memory), row_of(target, prompt)
        with reading(target, self.slots, [self.resident]) as reads:
            read_prompt(target, self.slots, 0, self.row, 100)
        self.row.sequence.append(7)
        following = self.row.sequence[1:]
        reads.tell(self.resident, [Shown(self.row, 0, 0, list(range(len(following))), following)])

    def round(self, shape: Shape) -> tuple[int, int]:
        """Play one; (proposed, accepted)."""
        plan = Plan(shape, [shape.depth], NOTHING, [0])
        (outcome,) = play(self.target, self.slots, [self.resident], [self.row], plan).outcomes
        self.row.sequence += outcome.tokens
        return outcome.proposed, outcome.accepted


@pytest.fixture
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def vectors(size: int) -> dict[int, torch.Tensor]:
    """All tensors of vectors of so many numbers, or of several such side by side, that anything holds: by identity."""
    gc.collect()
    held = [one for one in gc.get_objects() if type(one) is torch.Tensor and one.is_floating_point()]
    return {id(one): one for one in held if one.numel() and one.dim() and one.shape[-1] % size == 0}


@pytest.mark.usefixtures("inference")
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_between_rounds_a_row_keeps_one_vector_as_long_as_a_hidden_state(
    target: Target, drafter: LearntDrafter, shape: Shape
) -> None:
    """Of any kind, in a storage of its own; whatever else is new after a round, the next ones let go of."""
    rig, hidden = Rig(target, drafter, random_prompt(target, 1, 9)), target.model.config.hidden_size
    rig.round(shape)
    before = vectors(hidden)
    for _ in range(6):
        rig.round(shape)
    state = rig.row.state
    assert state is not None
    assert state.numel() <= hidden
    assert state.untyped_storage().nbytes() <= hidden * target.dtype.itemsize
    fresh = [one for number, one in vectors(hidden).items() if number not in before]
    assert [one is state for one in fresh] == [True]


@pytest.mark.usefixtures("inference")
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_after_some_rounds_the_state_is_that_of_the_text_read_at_once(
    target: Target, drafter: LearntDrafter, shape: Shape
) -> None:
    rig = Rig(target, drafter, random_prompt(target, 1, 9))
    for _ in range(6):
        rig.round(shape)
    server = Server(target, drafter, rows=1)
    server.follow([rig.row.sequence])
    (expected,) = (row.state for row in server.rows([rig.row.sequence], 1))
    assert rig.row.state is not None
    assert expected is not None
    torch.testing.assert_close(rig.row.state, expected, atol=1e-4, rtol=1e-4)
    assert rig.row.drafter_length == rig.row.target_length == len(rig.row.sequence) - 1


@pytest.mark.usefixtures("inference")
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_after_plain_rounds_it_looks_again_and_proposes_from_the_next_round_on(
    target: Target, drafter: LearntDrafter, shape: Shape
) -> None:
    rig = Rig(target, drafter, random_prompt(target, 1, 9))
    rig.round(shape)
    for _ in range(4):
        assert rig.round(Shape.chain(0)) == (0, 0)
    gap = (rig.row.drafter_length, rig.row.target_length)
    assert rig.round(shape) == (0, 0)
    assert rig.round(shape)[0] > 0
    assert rig.row.drafter_length == rig.row.target_length
    if drafter.decoder is not None:
        assert rig.row.drafter_gap == gap


@pytest.mark.usefixtures("inference")
@pytest.mark.parametrize("kind", ["eagle", "mtp"])
def test_after_plain_rounds_it_sees_what_it_read_before_them_and_since(target: Target, kind: str) -> None:
    """The state is that of a reading of the text which leaves out what was never shown; after a second gap, too."""
    drafter = shaken(first(target, kind, depths=3))
    assert isinstance(drafter, LayerDrafter)
    rig = Rig(target, drafter, random_prompt(target, 1, 9))
    left_out = None
    for _ in range(2):
        rig.round(Shape.chain(3))
        since = rig.row.drafter_length
        for _ in range(3):
            rig.round(Shape.chain(0))
        left_out = (since if left_out is None else left_out[0], rig.row.target_length)
        for _ in range(3):
            rig.round(Shape.chain(3))
        expected = read_without(target, drafter, rig.row.sequence, *left_out)
        assert rig.row.state is not None
        torch.testing.assert_close(rig.row.state, expected, atol=1e-4, rtol=1e-4)
        everything = read_without(target, drafter, rig.row.sequence, 0, 0)
        assert not torch.allclose(rig.row.state, everything, atol=1e-2)


def read_without(target: Target, drafter: LayerDrafter, text: list[int], first: int, end: int) -> torch.Tensor:
    """The layer's state after the last pair of a text, of which the pairs from `first` up to `end` are not seen."""
    taps = Taps(target.model, drafter.taps)
    with taps.reading():
        target.model(input_ids=torch.tensor([text[:-1]]))
    states, pairs = drafter.features(taps.hidden()), len(text) - 1
    at = torch.arange(pairs)
    seen = (at <= at[:, None]) & ((at < first) | (at >= end) | (at == at[:, None]))
    mask = additive(seen[None], torch.float32)
    return drafter.read(torch.tensor([text[1:]]), states, at[None], mask, DynamicCache())[0, -1]


@pytest.mark.usefixtures("inference")
def test_a_row_keeps_one_vector_between_rounds(target: Target, drafter: LearntDrafter) -> None:
    rig = Rig(target, drafter, random_prompt(target, 1, 9))
    for _ in range(3):
        rig.round(Shape(3, 9, 3))
    kept = [value for value in vars(rig.row).values() if isinstance(value, torch.Tensor)]
    assert [tensor.dim() for tensor in kept] == [1]
    one = torch.empty(target.model.config.hidden_size, dtype=target.dtype)
    assert kept[0].untyped_storage().nbytes() == kept[0].nbytes <= one.nbytes


@pytest.mark.parametrize("nodes", [0, 9], ids=["chain", "tree"])
def test_swaps_between_kinds_in_the_middle_of_requests_change_no_token(target: Target, nodes: int) -> None:
    kinds = [first(target, kind) for kind in CONDITIONED]
    line = [*kinds, first_layers(target, layers=2), None, *reversed(kinds), first_layers(target, layers=1)]
    check_swaps(target, kinds[-1], line, max_tokens=100, draft_length=3, tree_nodes=nodes)


def test_lanes_of_different_kinds_propose_in_one_batch(target: Target) -> None:
    """Each with its own draft vocabulary, sampled and greedy rows side by side."""
    lanes = {
        "": first_layers(target, layers=2, vocabulary=150),
        "m": first(target, "medusa", tokens=torch.arange(0, target.vocab_size, 2)),
        "e": first(target, "eagle"),
    }
    with running(target, None, slots=6, draft_length=3, tree_nodes=9) as engine:
        for number, (lane, drafter) in enumerate(lanes.items(), start=1):
            engine.swap(number, drafter, lane=lane).result(timeout=30)
        engine.lanes.route({"mw": "m", "ew": "e"})
        asked = [(seed, workload) for seed in range(3) for workload in ("w", "mw", "ew")]
        clients = [ask(engine, random_prompt(target, s), 30, workload=workload) for s, workload in asked]
        others = [ask(engine, random_prompt(target, s), 30, Policy(1.0), workload=w) for s, w in asked]
        outputs = [client.wait() for client in clients]
        versions = {r.version for client in clients + others for r in client.usage.rounds}
        assert engine.lanes.faults == 0
    assert outputs == [plain_greedy(target, random_prompt(target, seed), 30) for seed, _ in asked]
    assert versions == {1, 2, 3}
