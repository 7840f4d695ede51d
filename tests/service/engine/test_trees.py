"""Trees through the slots and through the whole engine: each path is what its chain would be, and so is the text."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from adapter.drafters.protocol import Branches, Proposal, Shape
from adapter.policy import Policy
from adapter.sampling import Sampler
from adapter.target import Target
from service.engine import attention
from service.engine.accept import Outcome
from service.engine.generation import Generation, Row
from service.engine.residents import Resident
from service.engine.rounds import branches_of, read_prompt, settle, verify
from service.engine.slots import Slots
from service.engine.text import TextStream
from tests.service.engine.oracle import GREEDY, ask, check_swaps, first_layers, plain_greedy, random_prompt, running
from tests.service.engine.test_accept import told
from tests.service.engine.test_families import family as family

EXACT = 1e-5
PARENTS = [
    [-1, -1, 0, 0, 1, 2, 5, 3],  # a tree of depth 4
    [-1, 0, 1, 2, 3, 4, 5, 6],  # a chain
    [-1, -1, -1, 0, 1, 2, -1, -1],  # three branches, and two tokens of padding
]
LENGTHS = [8, 8, 6]


def row_of(target: Target, prompt: list[int]) -> Row:
    generation = Generation("r", prompt, GREEDY, 100, lambda delta: None)
    sampler = Sampler(GREEDY, prompt, generation.output_ids)
    return Row(generation, TextStream(target.tokenizer, ()), sampler, list(prompt))


def full(target: Target, tokens: Sequence[int]) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = target.model(input_ids=torch.tensor([tokens])).logits[0, -1]
    return logits


def ways(parents: Sequence[int], node: int) -> list[int]:
    """The nodes from the root to this one."""
    return [] if node < 0 else [*ways(parents, parents[node]), node]


def proposal_of(target: Target, seed: int) -> Proposal:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(2, target.vocab_size, (3, 8), generator=generator)
    return Proposal(tokens, parents=torch.tensor(PARENTS), lengths=LENGTHS)


def three_rows(target: Target) -> tuple[Slots, list[Row]]:
    """Of different lengths, after their prompts and one token more."""
    attention.install(target.model)
    slots = Slots(target.model.get_decoder(), 3, 200)
    rows = [row_of(target, random_prompt(target, seed, length)) for seed, length in enumerate((3, 11, 40))]
    for slot, row in enumerate(rows):
        read_prompt(target, slots, slot, row, 100)
        row.sequence.append(7)
    return slots, rows


def branches(rows: Sequence[Row], proposal: Proposal) -> Branches:
    assert proposal.parents is not None
    return branches_of([row.target_length for row in rows], proposal.parents)


@torch.inference_mode()
def check(target: Target, rounds: int = 3) -> None:
    """Every path of every row's tree, and again after each acceptance of a path."""
    slots, rows = three_rows(target)
    for number in range(rounds):
        proposal = proposal_of(target, seed=10 + number)
        logits = verify(target, slots, rows, proposal, branches(rows, proposal))
        outcomes = []
        for i, row in enumerate(rows):
            tokens = proposal.tokens[i].tolist()
            for node in range(-1, LENGTHS[i]):
                expected = full(target, [*row.sequence, *(tokens[n] for n in ways(PARENTS[i], node))])
                torch.testing.assert_close(logits[i, node + 1], expected, atol=EXACT, rtol=EXACT)
            accepted = ways(PARENTS[i], (LENGTHS[i] - 1 - number) % LENGTHS[i])
            kept = [tokens[n] for n in accepted]
            outcomes.append(Outcome(4, len(kept), [*kept, 9], -1, 0.0, None, path=accepted))
        settle(slots, [Resident(0)] * 3, rows, outcomes, proposal)
        for row, outcome in zip(rows, outcomes, strict=True):
            row.sequence += outcome.tokens


def test_every_path_of_a_tree_gives_the_logits_of_its_chain(target: Target) -> None:
    check(target)


def test_on_other_families_too(family: Target) -> None:
    check(family, rounds=2)


GROWN = {"tree_nodes": 10, "draft_length": 4}


def test_greedy_output_with_trees_equals_plain_output(target: Target) -> None:
    with running(target, first_layers(target, layers=2), **GROWN) as engine:
        clients = [ask(engine, random_prompt(target, seed, 4 + 5 * seed), 30) for seed in range(6)]
        outputs = [client.wait() for client in clients]
        rounds = [r for client in clients for r in client.usage.rounds]
    assert outputs == [plain_greedy(target, random_prompt(target, seed, 4 + 5 * seed), 30) for seed in range(6)]
    assert 0 < sum(r.accepted for r in rounds) < sum(r.proposed for r in rounds)


def test_so_does_that_with_trees_of_a_fixed_form_fitted_to_each_workload(target: Target) -> None:
    with running(target, first_layers(target, layers=2, vocabulary=300), tree_nodes=10, draft_length=4) as engine:
        fixed = engine._shapes.largest + 1
        engine._speculation._pace._chosen = lambda asked: fixed  # type: ignore[method-assign]
        asked = [(seed, f"w{seed % 2}") for seed in range(12)]
        clients = [ask(engine, random_prompt(target, seed, 9), 30, workload=workload) for seed, workload in asked]
        sampled = [ask(engine, random_prompt(target, seed), 30, Policy(1.0)) for seed in range(3)]
        outputs = [client.wait() for client in clients]
        assert all(len(client.wait()) > 0 for client in sampled)
        assert engine.lanes.faults == 0
    assert outputs == [plain_greedy(target, random_prompt(target, seed, 9), 30) for seed, _ in asked]


def test_a_tree_accepts_more_than_the_chain_of_its_depth(target: Target) -> None:
    accepted = []
    for nodes in (0, 16):
        with running(target, first_layers(target, layers=2), tree_nodes=nodes, draft_length=4) as engine:
            rounds = [r for seed in range(8) for r in ask(engine, random_prompt(target, seed), 40).usage.rounds]
        accepted.append(sum(r.accepted for r in rounds) / len(rounds))
    assert accepted[1] > accepted[0] * 1.1


def test_other_families_decode_the_same_with_trees(family: Target) -> None:
    prompts = [random_prompt(family, seed, length) for seed, length in enumerate((3, 11, 40))]
    with running(family, first_layers(family, layers=1), slots=3, **GROWN) as engine:
        clients = [ask(engine, prompt, max_tokens=24) for prompt in prompts]
        assert [c.wait() for c in clients] == [plain_greedy(family, prompt, 24) for prompt in prompts]


def test_trees_chains_and_plain_rows_share_a_batch(target: Target) -> None:
    with running(target, first_layers(target, layers=2, vocabulary=200), slots=6, **GROWN) as engine:
        wanted = [None, 0, 1, 2, 4, None]
        clients = [ask(engine, random_prompt(target, s), 20 + s, draft_length=k) for s, k in enumerate(wanted)]
        sampled = [ask(engine, random_prompt(target, s), 20, policy=Policy(1.0)) for s in range(3)]
        for s, client in enumerate(clients):
            assert client.wait() == plain_greedy(target, random_prompt(target, s), 20 + s)
        assert all(len(client.wait()) > 0 for client in sampled)


def test_swaps_between_trees_change_no_token(target: Target) -> None:
    line = [first_layers(target, layers=1 + number % 3, seed=number) for number in range(2, 8)]
    check_swaps(target, first_layers(target, layers=1), line, **GROWN)


def test_a_seeded_request_says_the_same_with_trees_chains_and_plainly(target: Target) -> None:
    policy, prompt, said = Policy(0.9, top_p=0.95), random_prompt(target, 3), []
    for nodes, k in ((0, 0), (0, 4), (10, 4), (16, 3)):
        with running(target, first_layers(target, layers=2), tree_nodes=nodes, draft_length=max(k, 1)) as engine:
            said.append(ask(engine, prompt, 40, policy=policy, seed=7, draft_length=k).wait())
    assert said[0] == said[1] == said[2] == said[3]


def test_rounds_of_trees_keep_the_records_meaning(target: Target) -> None:
    """A rejection if and only if accepted < proposed, a teacher row there, and the emitted token is none refused."""
    with running(target, first_layers(target, layers=1), **GROWN) as engine:
        client = ask(engine, random_prompt(target, 6), max_tokens=60)
        output = client.wait()
    rounds = client.usage.rounds
    assert all((r.rejected_token >= 0) == (r.accepted < r.proposed) for r in rounds)
    refused = [r for r in rounds if r.accepted < r.proposed]
    assert [t.position for t in client.generation.teacher] == [r.start + r.accepted for r in refused]
    assert all(int(t.ids[0]) == output[t.position] for t in client.generation.teacher)
    assert all(r.rejected_token != output[r.start + r.accepted] for r in refused)
    spans = [(r.start, r.start + r.accepted + 1) for r in rounds]
    assert all(end == start for (_, end), (start, _) in pairwise(spans))


def test_log_probabilities_of_a_tree_are_those_of_its_text(target: Target) -> None:
    prompt = random_prompt(target, 2)
    with running(target, first_layers(target, layers=2), **GROWN) as engine:
        tokens, found = told(ask(engine, prompt, 30, logprobs=2))
    with torch.inference_mode():
        logits = target.model(input_ids=torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    assert [f.token for f in found] == tokens
    for row, one in zip(logits.log_softmax(-1), found, strict=True):
        assert abs(one.logprob - float(row[one.token])) < 1e-4


def test_a_request_that_fills_the_context_is_served(target: Target) -> None:
    prompt = random_prompt(target, 1, 100)
    with running(target, first_layers(target, layers=3), **GROWN) as engine:
        assert ask(engine, prompt, max_tokens=28).wait() == plain_greedy(target, prompt, 28)


def test_a_shape_says_how_much_room_it_takes() -> None:
    assert Shape.chain(4).places == 4
    assert Shape(4, 10, 4).places == 12
    assert Shape(4, 10, 2).places == 10
    assert Shape(2, 3, 4, form=(-1, -1, 0)).places == 3
