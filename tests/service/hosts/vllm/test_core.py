"""A core beside an engine that does to rows what vLLM does: texts, rounds, versions, swaps, and faults of a drafter."""

from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import pytest
import torch

from adapter.drafters.causal_lm import CausalLM
from adapter.target import Target
from service.engine.generation import clipped
from service.engine.ngrams import Ngrams
from service.engine.residents import Resident
from service.hosts.vllm.core import Core
from service.hosts.vllm.drafting import Bounds
from service.hosts.vllm.requests import Request
from service.placing import Offer
from storage.records import Round
from storage.registry import Version
from storage.shares import share_of
from tests.service.engine.oracle import UNGOVERNED, first_layers
from tests.service.hosts.vllm.engine import Asked, Engine, chain_after, said_by

K, CONTEXT = 3, 160
EXTRA = K + 1  # tokens that a target may have to say past an end


@dataclass
class Rig:
    """A core, and what it said of finished requests."""

    finished: list[Request] = field(default_factory=list)
    core: Core = field(init=False)

    def __post_init__(self) -> None:
        self.make()

    def make(self, reading: int = 10_000, fallback: Resident | None = None) -> None:
        self.core = Core(
            Bounds(4, CONTEXT, K, reading, 2**28), self.finished.append, governor=UNGOVERNED, fallback=fallback
        )

    def offer(self, number: int, drafter: Any, holdback: float = 0.0, guarded: bool = False) -> None:
        self.core.take(Offer(number, version(number), drafter, holdback, guarded))

    def run(self, engine: Engine) -> None:
        engine.run(self.core.begins, self.core.step)

    def rounds(self) -> dict[str, list[Round]]:
        return {request.generation.request_id: request.generation.rounds for request in self.finished}


@pytest.fixture
def rig() -> Rig:
    return Rig()


@pytest.fixture(scope="module")
def first(target: Target) -> CausalLM:
    return first_layers(target, layers=1, vocabulary=200, seed=1)


@pytest.fixture(scope="module")
def second(target: Target) -> CausalLM:
    return first_layers(target, layers=2, vocabulary=200, seed=2)


@pytest.fixture(scope="module")
def traffic(first: CausalLM) -> list[Asked]:
    """Requests of many lengths; some end by a token of the text, most by their bound."""
    made = []
    for n in range(14):
        prompt = [(7 * n + i * i) % 200 for i in range(4 + 5 * (n % 4))]
        max_tokens = 3 + 5 * (n % 5)
        says = said_by(first, prompt, max_tokens + EXTRA, seed=n)
        stop = frozenset({says[max_tokens // 2]}) if n % 3 == 0 else frozenset()
        made.append(Asked(f"r{n}", prompt, says, max_tokens, stop))
    return made


def fresh(traffic: list[Asked], **params: Any) -> list[Asked]:
    return [Asked(a.id, a.prompt, a.says, a.max_tokens, a.stop, params) for a in traffic]


def submitted(engine: Engine, traffic: list[Asked]) -> list[Asked]:
    return [engine.submit(asked) for asked in fresh(traffic)]


def check(rig: Rig, asked: list[Asked]) -> None:
    """Every request came out as the target says, and its rounds as the scheduler counted them."""
    records = {request.generation.request_id: request.generation for request in rig.finished}
    assert sorted(records) == sorted(a.id for a in asked)
    for a in asked:
        assert a.output == a.says[: len(a.output)]
        found = records[a.id]
        assert found.output_ids == a.output
        assert found.prompt_ids == a.prompt
        counted = [
            Round(p.start, r.version, len(p.drafted), p.accepted, refused(p.drafted, p.accepted),
                  1.0 if p.accepted < len(p.drafted) else 0.0, r.draft_ms, r.verify_ms)
            for p, r in zip(a.rounds, found.rounds, strict=True)
        ]  # fmt: skip
        assert found.rounds == clipped(counted, len(a.output))


def version(number: int) -> Version:
    return Version(number, "demo", number, None, "00", 1, datetime.now(UTC), None)


def refused(drafted: list[int], accepted: int) -> int:
    return drafted[accepted] if accepted < len(drafted) else -1


@pytest.mark.parametrize("seed", range(6))
def test_every_round_is_known_whatever_happens_to_the_rows(
    rig: Rig, first: CausalLM, traffic: list[Asked], seed: int
) -> None:
    rig.make(reading=20 if seed % 3 == 0 else 10_000)
    rig.offer(1, first.twin())
    engine = Engine(rows=4, context=CONTEXT, chunk=9, seed=seed, trims=seed % 2 == 1)
    asked = submitted(engine, traffic)
    while engine.waiting or engine.batch or engine.preempted or engine.ended:
        engine.step(rig.core.begins, rig.core.step)
        if engine.batch and engine.random.random() < 0.15:
            engine.preempt(engine.random.randrange(len(engine.batch)))
    check(rig, asked)
    assert not rig.core.faults
    assert all(r.version == 1 for rounds in rig.rounds().values() for r in rounds)
    accepted = [r.accepted for rounds in rig.rounds().values() for r in rounds]
    assert 0.5 < sum(accepted) / len(accepted) < 3  # the texts mostly agree with the drafter


@pytest.mark.parametrize("seed", range(4))
def test_steps_that_the_proposer_is_not_called_in_cost_rounds_and_no_token(
    rig: Rig, first: CausalLM, traffic: list[Asked], seed: int
) -> None:
    rig.offer(1, first.twin())
    engine = Engine(rows=4, context=CONTEXT, seed=seed, blind=0.3)
    asked = submitted(engine, traffic)
    rig.run(engine)
    records = {request.generation.request_id: request.generation for request in rig.finished}
    for a in asked:
        assert records[a.id].output_ids == a.output
        counted = {(p.start, min(p.accepted, len(a.output) - p.start)) for p in a.rounds}
        assert {(r.start, r.accepted) for r in records[a.id].rounds} <= counted
    assert engine.blind_steps > 0
    assert rig.core._requests.missed > 0
    assert not rig.core.faults


def test_proposals_are_the_live_versions_own(rig: Rig, first: CausalLM, traffic: list[Asked]) -> None:
    rig.offer(1, first.twin())
    engine = Engine(rows=4, context=CONTEXT, seed=3)
    asked = submitted(engine, traffic[:4])
    for _ in range(6):
        engine.step(rig.core.begins, rig.core.step)
        for a in engine.batch:
            wanted = min(K, a.max_tokens - len(a.output) - 1)
            assert a.proposal == chain_after(first, a.text, max(wanted, 0))
    assert any(a.rounds for a in asked)


def test_a_swap_between_two_steps_changes_who_proposes_and_nothing_else(
    rig: Rig, first: CausalLM, second: CausalLM, traffic: list[Asked]
) -> None:
    rig.offer(1, first.twin())
    engine = Engine(rows=4, context=CONTEXT, seed=1)
    asked = submitted(engine, traffic)
    number = 1
    while engine.waiting or engine.batch or engine.ended:
        if engine.steps % 4 == 3:
            number += 1
            rig.offer(number, (second if number % 2 == 0 else first).twin())
            assert rig.core.version == number
        before = {a.id: len(a.rounds) for a in asked}
        engine.step(rig.core.begins, rig.core.step)
        for a in engine.batch:
            wanted = max(min(K, a.max_tokens - len(a.output) - 1), 0)
            assert a.proposal == chain_after(second if number % 2 == 0 else first, a.text, wanted)
        assert all(len(a.rounds) >= before[a.id] for a in asked)
    check(rig, asked)
    assert len({r.version for rounds in rig.rounds().values() for r in rounds}) > 3


def test_a_share_of_the_requests_stays_on_the_version_before(
    rig: Rig, first: CausalLM, second: CausalLM, traffic: list[Asked]
) -> None:
    rig.offer(1, first.twin())
    rig.offer(2, second.twin(), holdback=0.4)
    engine = Engine(rows=4, context=CONTEXT)
    asked = submitted(engine, traffic)
    rig.run(engine)
    check(rig, asked)
    for name, rounds in rig.rounds().items():
        assert {r.version for r in rounds} <= {1 if share_of(name) < 0.4 else 2}
    assert {r.version for rounds in rig.rounds().values() for r in rounds} == {1, 2}
    rig.core.hold(0.0)
    assert rig.core.version == 2


def test_a_new_version_that_proposes_nonsense_is_gone_back_from(
    rig: Rig, first: CausalLM, traffic: list[Asked]
) -> None:
    broken = first.twin()
    with torch.no_grad():
        broken.head.weight.neg_()
    rig.offer(1, first.twin())
    engine = Engine(rows=4, context=CONTEXT)
    submitted(engine, traffic)
    rig.run(engine)
    rig.offer(2, broken, holdback=0.01, guarded=True)
    engine = Engine(rows=4, context=CONTEXT, seed=2)
    again = [engine.submit(Asked(f"again-{a.id}", a.prompt, a.says, a.max_tokens, a.stop)) for a in traffic]
    rig.run(engine)
    assert all(a.output == a.says[: len(a.output)] for a in again)
    found = rig.core.broken()
    assert found is not None
    assert found.version == 2
    assert rig.core.version == 1


def test_a_drafter_that_raises_costs_its_proposals_and_nothing_else(
    rig: Rig, first: CausalLM, traffic: list[Asked], monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = first.twin()
    rig.offer(1, failing)
    calls = 0

    def propose(*args: object) -> object:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise RuntimeError("out of memory")
        return CausalLM.propose(failing, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(failing, "propose", propose)
    engine = Engine(rows=4, context=CONTEXT)
    asked = submitted(engine, traffic)
    rig.run(engine)
    check(rig, asked)
    assert rig.core.faults == {"drafter: RuntimeError": 1}
    assert rig.core.version == 0  # until another swap
    rig.offer(2, first.twin())
    assert rig.core.version == 2


def test_without_a_drafter_nothing_is_proposed_and_requests_are_still_known(rig: Rig, traffic: list[Asked]) -> None:
    engine = Engine(rows=4, context=CONTEXT)
    asked = submitted(engine, traffic)
    rig.run(engine)
    check(rig, asked)
    assert not any(a.rounds for a in asked)


def test_ngrams_propose_where_no_version_does_and_are_version_0(rig: Rig, target: Target) -> None:
    rig.make(fallback=Ngrams.of(target.vocab_size, target.device, 0).resident)
    line = [5, 9, 14, 20, 27]
    engine = Engine(rows=4, context=CONTEXT)
    asked = [engine.submit(Asked(f"r{n}", line * 3, line * 5, 12 + n)) for n in range(3)]
    rig.run(engine)
    check(rig, asked)
    rounds = [r for rounds in rig.rounds().values() for r in rounds]
    assert {r.version for r in rounds} == {0}
    assert sum(r.accepted for r in rounds) > 0.8 * sum(r.proposed for r in rounds)


def test_without_a_word_of_the_runner_rows_are_proposed_for_and_not_recorded(
    rig: Rig, first: CausalLM, traffic: list[Asked]
) -> None:
    rig.offer(1, first.twin())
    engine = Engine(rows=4, context=CONTEXT)
    asked = submitted(engine, traffic)
    engine.run(lambda runner, scheduled: None, rig.core.step)
    assert all(a.output == a.says[: len(a.output)] for a in asked)
    assert sum(p.accepted for a in asked for p in a.rounds) > 20
    assert rig.finished == []


def test_a_request_of_a_policy_that_redraft_does_not_know_is_served_without_a_record(
    rig: Rig, first: CausalLM, traffic: list[Asked]
) -> None:
    rig.offer(1, first.twin())
    engine = Engine(rows=4, context=CONTEXT)
    asked = [engine.submit(a) for a in [*fresh(traffic[:1], temperature=9.0), *fresh(traffic[1:3])]]
    rig.run(engine)
    assert all(a.output == a.says[: len(a.output)] for a in asked)
    assert sorted(rig.rounds()) == ["r1", "r2"]
    assert set(rig.core.faults) == {"request: ValueError"}
