"""Streams that ride in the verifying pass: the main stream is untouched, and they say what a pass of their own says."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from adapter.drafters import candidates
from adapter.drafters.kinds import Sizes, first_version
from adapter.drafters.learnt import DrafterRefused
from adapter.drafters.protocol import Shape
from adapter.drafters.shared import Shared
from adapter.drafters.streaming import Streaming
from adapter.policy import Policy
from adapter.target import Target
from service.engine.following import reading
from service.engine.residents import Resident
from service.engine.rounds import verify
from service.engine.slots import Slots
from tests.adapter.conditioned import hidden_of, shaken
from tests.service.engine.oracle import ask, check_swaps, plain_greedy, random_prompt, running
from tests.service.engine.small import LENGTH, PROMPT, exact, p_value, small_target
from tests.service.engine.test_following import SHAPES, Rig
from tests.service.engine.test_trees import LENGTHS, PARENTS, branches, proposal_of, three_rows, ways

STREAMS = 3
NODES = {"chain": 0, "tree": 9}


def riding(target: Target, passes: int = 1, layers: int = 2) -> Streaming:
    shared, known = Shared(target.embedding, target.files), torch.arange(target.vocab_size)
    sizes = Sizes(layers=layers, depths=STREAMS, rank=4, passes=passes)
    made = first_version("streaming", target.model, shared, known, sizes)
    assert isinstance(made, Streaming)
    shaken(made, 0.02)
    return made


@pytest.mark.parametrize("nodes", NODES.values(), ids=NODES)
@pytest.mark.parametrize("chunk", [3, 64])
def test_greedy_output_equals_plain_output(target: Target, nodes: int, chunk: int) -> None:
    prompts = [random_prompt(target, seed, 2 + 7 * seed) for seed in range(5)]
    with running(target, riding(target), slots=3, draft_length=3, tree_nodes=nodes, prefill_chunk=chunk) as engine:
        clients = [ask(engine, prompt, 20 + i) for i, prompt in enumerate(prompts)]
        outputs = [client.wait() for client in clients]
        assert all(client.usage.rounds for client in clients)
        assert engine.lanes.faults == 0
    assert outputs == [plain_greedy(target, prompt, 20 + i) for i, prompt in enumerate(prompts)]


@torch.inference_mode()
def verified(target: Target, drafter: Streaming | None) -> tuple[Tensor, Slots, Tensor]:
    """A pass over the trees of three rows: its logits, the target's memory, and what rode in it."""
    slots, rows = three_rows(target)
    proposal = proposal_of(target, seed=10)
    resident = Resident(1, drafter)
    with reading(target, slots, [resident]) as reads:
        logits = verify(target, slots, rows, proposal, branches(rows, proposal))
    return logits, slots, torch.empty(0) if drafter is None else reads._taps[resident].hidden()


def test_the_main_stream_is_untouched_bit_for_bit(target: Target) -> None:
    """Its logits, and all that it leaves in its memory."""
    alone, memory, _ = verified(target, None)
    ridden, beside, streams = verified(target, riding(target))
    assert torch.equal(alone, ridden)
    for one, other in zip(memory.layers, beside.layers, strict=True):
        assert torch.equal(one.keys, other.keys)
        assert torch.equal(one.values, other.values)
    assert streams.shape == (3, 9, STREAMS * target.embedding.shape[1])


@pytest.mark.parametrize("layers", [1, 2])
def test_at_every_node_of_a_tree_streams_are_those_of_the_text_that_leads_to_it(target: Target, layers: int) -> None:
    """As training unrolls them."""
    drafter = riding(target, layers=layers)
    _, _, streams = verified(target, drafter)
    proposal = proposal_of(target, seed=10)
    for i, length in enumerate((3, 11, 40)):
        prompt, tokens = [*random_prompt(target, i, length), 7], proposal.tokens[i].tolist()
        for node in range(-1, LENGTHS[i]):
            text = [*prompt, *(tokens[n] for n in ways(PARENTS[i], node)), 0]
            with torch.inference_mode():
                hidden = hidden_of(target, drafter, text)[None]
                expected = torch.cat(
                    [states[0, -1] for states in drafter.unrolled(torch.tensor([text]), hidden, None, STREAMS)]
                )
            torch.testing.assert_close(streams[i, node + 1], expected, atol=1e-4, rtol=1e-4)


def test_in_one_pass_or_two_a_request_has_the_same_rounds(target: Target) -> None:
    """Of chains; a tree's nodes are weighed by probabilities, which are those among the candidates that are kept."""
    said = []
    for passes in (1, 2):
        with running(target, riding(target, passes), draft_length=3) as engine:
            client = ask(engine, random_prompt(target, 3, 17), 40)
            said.append([(r.start, r.proposed, r.accepted, r.rejected_token) for r in client.usage.rounds])
    assert said[0] == said[1]


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_row_keeps_no_more_than_one_hidden_state_and_no_memory(target: Target, shape: Shape) -> None:
    drafter = riding(target)
    with torch.inference_mode():
        rig = Rig(target, drafter, random_prompt(target, 1, 9))
        for _ in range(3):
            assert rig.round(shape)[0] > 0
    assert rig.row.state is not None
    assert rig.row.state.untyped_storage().nbytes() <= target.embedding.shape[1] * target.embedding.itemsize
    assert rig.row.drafter_memory is None


def test_after_plain_rounds_it_proposes_from_all_of_the_text(target: Target) -> None:
    """It keeps no memory that could have a gap: only the first round goes without a proposal."""
    drafter = riding(target)
    with torch.inference_mode():
        rig = Rig(target, drafter, random_prompt(target, 1, 9))
        for _ in range(4):
            rig.round(Shape.chain(0))
        assert rig.round(Shape.chain(3)) == (0, 0)
        other = Rig(target, drafter, rig.row.sequence[:-1])
        other.row.sequence[-1] = rig.row.sequence[-1]
        assert rig.round(Shape.chain(3)) == other.round(Shape.chain(3))
    torch.testing.assert_close(rig.row.state, other.row.state, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("nodes", NODES.values(), ids=NODES)
def test_sampled_output_follows_the_targets_distribution(
    target: Target, tmp_path_factory: pytest.TempPathFactory, nodes: int
) -> None:
    folder, small = tmp_path_factory.mktemp("small"), small_target(target)
    small.model.save_pretrained(folder)
    small = replace(small, files=replace(target.files, path=folder))
    policies = (Policy(1.0), Policy(1.2, top_k=3))
    with running(
        small, riding(small), slots=64, draft_length=2, tree_nodes=nodes and 7, context=16, waiting=800
    ) as engine:
        clients = [[ask(engine, PROMPT, LENGTH, policy) for policy in policies] for _ in range(400)]
        outputs = [[tuple(client.wait()) for client in column] for column in zip(*clients, strict=True)]
        accepted = sum(r.accepted for row in clients for client in row for r in client.usage.rounds)
        assert engine.lanes.faults == 0
    assert accepted > 100
    for policy, found in zip(policies, outputs, strict=True):
        assert p_value(found, exact(small, policy)) > 1e-6


def test_swaps_between_passes_and_kinds_in_the_middle_of_requests_change_no_token(target: Target) -> None:
    line = [riding(target), riding(target, 2), riding(target), None, riding(target, 1, layers=1)]
    check_swaps(target, riding(target, 2), line, draft_length=3, tree_nodes=9)


def test_under_the_governor_the_text_is_the_same(target: Target) -> None:
    prompts = [random_prompt(target, seed, 12) for seed in range(4)]
    with running(target, riding(target), governed=True, draft_length=3, tree_nodes=9) as engine:
        outputs = [client.wait() for client in [ask(engine, prompt, 60) for prompt in prompts]]
        assert engine.lanes.faults == 0
    assert outputs == [plain_greedy(target, prompt, 60) for prompt in prompts]


def test_what_goes_wrong_on_a_ride_leaves_the_requests_alone(target: Target) -> None:
    drafter = riding(target)
    with running(target, drafter, draft_length=3) as engine:
        broken = drafter.decoder.layers[0].self_attn
        client = ask(engine, random_prompt(target, 1), 60)
        broken.forward = lambda *given, **named: 1 / 0
        assert client.wait() == plain_greedy(target, random_prompt(target, 1), 60)
        assert ask(engine, random_prompt(target, 2), 20).wait() == plain_greedy(target, random_prompt(target, 2), 20)
        assert engine.lanes.faults == 1


def test_candidates_are_the_likeliest_tokens_in_the_room_of_a_hidden_state() -> None:
    logits = torch.randn(2, 3, 50)
    count = candidates.most(32, torch.float32, 3)
    state = candidates.kept(logits, count)
    assert state.nbytes <= 2 * 32 * 4
    back = candidates.logits_of(state, 3, 50)
    best = logits.topk(count, dim=-1)
    assert torch.equal(back.topk(count, dim=-1).indices, best.indices)
    assert torch.equal(back.gather(2, best.indices), best.values)
    assert int((back.softmax(-1) > 0).sum()) == 2 * 3 * count


def test_other_numbers_of_passes_are_refused(target: Target) -> None:
    with pytest.raises(DrafterRefused, match="ask for 1 or 2"):
        riding(target, passes=3)


def test_served_streams_go_through_the_targets_own_layers(target: Target) -> None:
    """No version has a copy of them; its tensors are what they were."""
    drafter = riding(target)
    before = {name: tensor.clone() for name, tensor in drafter.own_tensors().items()}
    drafter.join(target.model)
    theirs = {id(module) for module in target.model.modules()}
    bases = [module.base for module in drafter.modules() if hasattr(module, "base")]
    assert len(bases) == 2 * 7
    assert all(id(base) in theirs for base in bases)
    after = drafter.own_tensors()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)
