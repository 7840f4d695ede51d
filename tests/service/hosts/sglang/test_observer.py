"""Rounds and records out of what SGLang's batches say; the names in them are held by `make test-contracts`."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from service.hosts.sglang_plugin import loader
from service.hosts.sglang_plugin.observer import HELD, Observer, committed
from service.hosts.sglang_plugin.pointer import Wanted
from service.origin import Origin
from storage.records import FeedbackRecord, Round
from storage.validation import validate

ORIGIN = Origin("f" * 64, "t" * 64, "chat")


@dataclass
class Req:
    """A request as SGLang holds it."""

    rid: str
    origin_input_ids: list[int] = field(default_factory=lambda: [5, 6])
    output_ids: list[int] = field(default_factory=list)
    sampling_params: Any = None
    finished_reason: Any = None
    grammar: Any = None
    is_retracted: bool = False

    def __post_init__(self) -> None:
        self.sampling_params = self.sampling_params or sampling()

    @property
    def output_ids_through_stop(self) -> list[int]:
        return self.output_ids

    def finished(self) -> bool:
        return self.finished_reason is not None


def sampling(**given: Any) -> SimpleNamespace:
    """Greedy, as SGLang says it."""
    said = {
        "temperature": 1.0, "top_p": 1.0, "top_k": 1, "frequency_penalty": 0.0, "presence_penalty": 0.0,
        "repetition_penalty": 1.0, "logit_bias": None, "custom_params": None,
    }  # fmt: skip
    return SimpleNamespace(**{**said, **given})


@pytest.fixture(autouse=True)
def _version_4_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "_loaded", Wanted("p", "chat", 4, "", ""))


@pytest.fixture
def records() -> list[FeedbackRecord]:
    return []


@pytest.fixture
def observer(records: list[FeedbackRecord]) -> Observer:
    return Observer(records.append, lambda: ORIGIN, lambda: True, lambda: 3)


def play(observer: Observer, req: Req, accepted: int, tokens: list[int], stop: bool = False) -> None:
    """One round as SGLang's batch processor goes through it."""
    batch, result = SimpleNamespace(reqs=[req]), SimpleNamespace(num_correct_drafts_per_req_cpu=[accepted])
    observer.verified(batch, result)
    req.output_ids.extend(tokens)
    if stop:
        req.finished_reason = SimpleNamespace(to_json=lambda: {"type": "stop", "matched": 0})
    observer.settled(req)


def test_a_finished_request_is_a_record_with_its_rounds(observer: Observer, records: list[FeedbackRecord]) -> None:
    req = Req("r1", output_ids=[9])
    play(observer, req, 1, [10, 11])
    play(observer, req, 3, [12, 13, 14, 15], stop=True)
    (record,) = records
    assert record.rounds == (Round(1, 4, 3, 1, -1, 0, 0, 0), Round(3, 4, 3, 3, -1, 0, 0, 0))
    assert record.output.tolist() == [9, 10, 11, 12, 13, 14, 15]
    assert (record.temperature, record.top_k, record.finish_reason, record.source) == (0.0, 0, "stop", "sglang")
    validate(record, 100)


def test_a_round_that_the_end_cut_short_proposed_only_what_was_committed() -> None:
    rounds = [Round(0, 1, 3, 3, -1, 0, 0, 0), Round(4, 1, 3, 2, -1, 0, 0, 0), Round(7, 1, 3, 0, -1, 0, 0, 0)]
    assert [(r.proposed, r.accepted) for r in committed(rounds, 6)] == [(3, 3), (2, 2)]
    assert [(r.proposed, r.accepted) for r in committed(rounds, 8)] == [(3, 3), (3, 2), (1, 0)]


def test_what_a_client_says_of_its_request_is_kept(observer: Observer, records: list[FeedbackRecord]) -> None:
    said = {"redraft_workload": "sql", "redraft_tenant": "acme", "redraft_train": "no"}
    req = Req("r1", sampling_params=sampling(temperature=0.7, top_k=1 << 30, custom_params=said))
    play(observer, req, 0, [3], stop=True)
    (record,) = records
    assert (record.workload, record.tenant, record.train, record.policy) == ("sql", "acme", False, "t0.7")
    assert (record.prompt.tolist(), record.output.tolist(), record.top_k) == ([0, 0], [0], 0)


def test_a_client_may_opt_out_by_any_word_for_no(observer: Observer, records: list[FeedbackRecord]) -> None:
    for number, no in enumerate(("No", False, 0)):
        params = sampling(custom_params={"redraft_train": no, "redraft_workload": "x" * 65})
        play(observer, Req(f"r{number}", sampling_params=params), 0, [3], stop=True)
    assert [(r.train, r.workload) for r in records] == [(False, "default")] * 3


def test_structured_and_adjusted_requests_are_marked(observer: Observer, records: list[FeedbackRecord]) -> None:
    play(observer, Req("r1", grammar=object()), 0, [3], stop=True)
    play(observer, Req("r2", sampling_params=sampling(repetition_penalty=1.1)), 0, [3], stop=True)
    assert [(r.structured, r.adjusted) for r in records] == [(True, False), (False, True)]


def test_a_retracted_request_has_no_round(observer: Observer, records: list[FeedbackRecord]) -> None:
    req = Req("r1", is_retracted=True)
    play(observer, req, 2, [])
    req.is_retracted = False
    play(observer, req, 1, [7, 8], stop=True)
    assert [(r.start, r.accepted) for r in records[0].rounds] == [(0, 1)]


def test_nothing_is_raised_into_the_scheduler(observer: Observer) -> None:
    observer.verified(SimpleNamespace(), SimpleNamespace())
    observer.settled(SimpleNamespace())
    assert observer.faults == 2


def test_requests_that_never_end_are_forgotten(observer: Observer) -> None:
    for number in range(HELD + 10):
        play(observer, Req(f"r{number}"), 0, [1])
    assert len(observer._seen) == HELD


def test_before_the_drafter_is_known_nothing_is_recorded(records: list[FeedbackRecord]) -> None:
    observer = Observer(records.append, lambda: None, lambda: True, lambda: 3)
    play(observer, Req("r1"), 0, [1], stop=True)
    assert records == []


def test_before_a_version_was_pushed_nothing_is_recorded(
    observer: Observer, records: list[FeedbackRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "_loaded", loader.NOBODY)
    play(observer, Req("r1"), 0, [1], stop=True)
    assert records == []
