"""The circle around a real vLLM server: feedback, learning, a swap and a rollback while it serves, and the text.

Run by `make test-vllm`, not by `make test`: some fifteen minutes. The tests are one story, in the order in which they
stand here; what was measured is printed, and kept in build/vllm/.
"""

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import structlog
import torch

from adapter.target import Target, TargetConfig, load
from service.engine.generation import clipped
from service.hosts.sidecar.rounds import BLOCK
from storage.database import open_database
from storage.records import FeedbackRecord, Round
from storage.registry import Registry
from storage.servers import Servers
from tests.live.vllm.judging import Judged, as_often, judged
from tests.live.vllm.prompts import prompts
from tests.live.vllm.rig import DRAFTER, Answer, Counted, K, Prompt, Server, Stack, serving, stack, tail
from tests.test_packages import CHECKOUT

REPORT = CHECKOUT / "build" / "vllm-report"
PROMPTS = prompts(int(os.environ.get("REQUESTS", "100")))
ALONE = PROMPTS[:30]  # sent one at a time with speculation, too
log = structlog.get_logger()
SENSIBLE = -4.0  # of a token on average; one at random has -11 or less
CHANCE = 0.01  # below which departures with swaps are more than without


def note(**figures: object) -> None:
    """Print what was measured, and keep it."""
    REPORT.mkdir(parents=True, exist_ok=True)
    with (REPORT / "figures.jsonl").open("a") as file:
        file.write(json.dumps(figures) + "\n")
    log.info("measured", **figures)


def until(condition: Callable[[], bool], seconds: float, why: Callable[[], str]) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, why()
        time.sleep(0.5)


@pytest.fixture(scope="module")
def beside(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with stack(tmp_path_factory.mktemp("redraft")) as made:
        yield made


@pytest.fixture(scope="module")
def plain(beside: Stack) -> dict[str, list[Answer]]:
    """The same server without speculation: every request alone, and four at a time."""
    with serving(beside, "plain", False) as server:
        server.ask_all(PROMPTS[:4])
        return {"alone": server.ask_all(PROMPTS, 1), "together": server.ask_all(PROMPTS)}


@pytest.fixture(scope="module")
def server(beside: Stack, plain: dict[str, list[Answer]]) -> Iterator[Server]:
    """With the proposer, and version 1 in it."""
    with serving(beside, "speculating", True) as started:
        until(lambda: serves(beside, 1), 60, lambda: tail(started.log))
        yield started
    kept = REPORT / "server.log"
    kept.write_bytes(started.log.read_bytes())


@pytest.fixture(scope="module")
def exactly(beside: Stack) -> dict[bool, list[Answer]]:
    """Some requests one at a time in fp32, without speculation and with it."""
    found = {}
    for speculate in (False, True):
        with serving(beside, f"fp32-{speculate}", speculate, dtype="float32") as server:
            if speculate:
                until(partial(applied, server), 60, partial(tail, server.log))
            found[speculate] = server.ask_all(ALONE, 1)
    return found


@pytest.fixture(scope="module")
def target(beside: Stack) -> Target:
    return load(TargetConfig(dtype="bf16", cache=Path(beside.environ["REDRAFT_CACHE"])))


@pytest.fixture(scope="module")
def first(server: Server) -> dict[str, list[Answer] | Counted]:
    """Version 1, with nobody learning yet: some requests alone, and all four at a time."""
    alone = server.ask_all(ALONE, 1)
    before = server.counters()
    return {"alone": alone, "together": server.ask_all(PROMPTS), "counted": server.counters().since(before)}


def applied(server: Server) -> bool:
    return "live.applied" in server.log.read_text(errors="replace")


def registry(beside: Stack) -> Registry:
    return Registry(open_database(beside.storage.sql_url))


def serves(beside: Stack, number: int) -> bool:
    found = Servers(open_database(beside.storage.sql_url)).live(DRAFTER)
    return any(one.host_kind == "vllm" and one.version == number for one in found)


def record_of(records: list[FeedbackRecord], answer: Answer) -> FeedbackRecord:
    """vLLM puts an ending of its own to the id that its client is told."""
    (found,) = [record for record in records if record.request_id.startswith(answer.id)]
    return found


def test_one_at_a_time_in_bf16_every_departure_is_a_near_tie(
    plain: dict[str, list[Answer]], first: dict[str, list[Answer]], target: Target
) -> None:
    found = judged("alone", target, plain["alone"][: len(ALONE)], first["alone"])
    note(arm=str(found))
    assert found.verdicts["different"] == 0


def test_feedback_equals_vllms_own_steps_request_for_request(beside: Stack, first: dict[str, list[Answer]]) -> None:
    check_feedback(beside, [*first["alone"], *first["together"]], "version 1")


def check_feedback(beside: Stack, answers: list[Answer], of: str) -> None:
    """Each answer has its record, with vLLM's own tokens and rounds."""
    wanted = {answer.id for answer in answers}
    until(lambda: len(known(beside.records(), wanted)) == len(wanted), 30, lambda: "records are missing")
    records, cut = beside.records(), 0
    for answer in answers:
        record = record_of(records, answer)
        assert record.prompt.tolist() == answer.prompt_ids
        assert record.output.tolist() == answer.tokens
        assert (record.workload, record.policy) == (answer.prompt.workload, "greedy")
        assert record.finish_reason == answer.finish_reason
        theirs, ours = steps(answer, record), [(r.proposed, r.accepted) for r in record.rounds]
        assert ours == theirs
        cut += bool(theirs) and answer.accepted[-1] != theirs[-1][1]
    rounds = sum(len(answer.drafted) for answer in answers)
    note(feedback_of=of, requests=len(answers), rounds=rounds, accepted_tokens_past_an_end=cut)


def known(records: list[FeedbackRecord], wanted: set[str]) -> set[str]:
    """Those of the ids that have a record."""
    return {found for found in (record.request_id.rpartition("-")[0] for record in records) if found in wanted}


def steps(answer: Answer, record: FeedbackRecord) -> list[tuple[int, int]]:
    """vLLM's steps as (proposed, accepted), without what stands past the output's end, which it counts as well.

    Nor is padding a proposal, which it counts as one where all of a prompt but its last token was cached.
    """
    padded = len(answer.drafted) == len(record.rounds) + 1 and len(answer.prompt_ids) % BLOCK == 1
    drafted, accepted = answer.drafted[padded:], answer.accepted[padded:]
    assert not padded or (answer.drafted[0], answer.accepted[0]) == (K, 0)
    told = zip(record.rounds, drafted, accepted, strict=True)
    rounds = [Round(r.start, 1, drafted, accepted, -1, 0.0, 0.0, 0.0) for r, drafted, accepted in told]
    return [(r.proposed, r.accepted) for r in clipped(rounds, len(answer.tokens))]


def test_the_worker_distils_and_versions_are_swapped_in_while_requests_run(
    beside: Stack, server: Server, first: dict[str, list[Answer]]
) -> None:
    for role in ("trainer", "housekeeper", "beat"):
        beside.start(role)
    deadline, sent = time.monotonic() + 420, 0
    while registry(beside).pointer(DRAFTER).live.number < 3 and time.monotonic() < deadline:
        sent += len(server.ask_all(PROMPTS[sent % len(PROMPTS) :][:20]))  # raises where one fails
    live = registry(beside).pointer(DRAFTER).live.number
    note(sent_while_learning=sent, live=live)
    assert live > 1, tail(beside.home / "trainer.log")
    until(lambda: serves(beside, live), 30, lambda: tail(server.log))
    served = {r.version for record in beside.records() for r in record.rounds}
    assert live in served or serves(beside, live)
    for child in beside.children:
        child.terminate()


def test_acceptance_on_vllms_metrics_has_risen(beside: Stack, server: Server, first: dict[str, Counted]) -> None:
    before = server.counters()
    answers = server.ask_all(PROMPTS)
    after = server.counters().since(before)
    check_feedback(beside, answers, "what was learnt")
    note(k=K, acceptance_length_version_1=first["counted"].length, acceptance_length_now=after.length)
    assert after.length > first["counted"].length + 0.2


@pytest.fixture(scope="module")
def swapping(beside: Stack, server: Server) -> list[Answer]:
    """All requests, four at a time, while the pointer goes to and fro between two versions."""
    holder, over, moves = registry(beside), threading.Event(), 0
    newest = holder.pointer(DRAFTER).live.number

    def swap() -> None:
        nonlocal moves
        while not over.wait(2.0):
            live = holder.pointer(DRAFTER).live.number
            holder.rollback(DRAFTER, newest if live == 1 else 1, "test", "to and fro")
            moves += 1

    thread = threading.Thread(target=swap)
    thread.start()
    try:
        answers = server.ask_all(PROMPTS)
    finally:
        over.set()
        thread.join()
    check_feedback(beside, answers, "both, swapped to and fro")
    records = beside.records()
    versions = [{r.version for r in record_of(records, a).rounds} for a in answers]
    note(swaps=moves, requests_that_saw_two_versions=sum(len(each) > 1 for each in versions))
    assert moves >= 4
    return answers


def test_four_at_a_time_every_departure_is_a_near_tie_and_swaps_add_none(
    plain: dict[str, list[Answer]], first: dict[str, list[Answer]], swapping: list[Answer], target: Target
) -> None:
    arms = {"plain": plain["together"], "speculating": first["together"], "swapping": swapping}
    found = {name: judged(name, target, plain["alone"], answers) for name, answers in arms.items()}
    for one in found.values():
        note(arm=str(one))
    assert all(one.verdicts["different"] == 0 for one in found.values()), [str(one) for one in found.values()]
    chance = rarer(found["speculating"], found["swapping"])
    note(departed={name: one.departed for name, one in found.items()}, chance_that_swaps_add_none=chance)
    assert chance > CHANCE


def rarer(without: Judged, swapping: Judged) -> float:
    return as_often(without.departed, len(without.found), swapping.departed, len(swapping.found))


def test_a_rollback_returns_when_vllm_has_followed_and_proposals_are_the_older_versions(
    beside: Stack, server: Server
) -> None:
    holder = registry(beside)
    beside.redraft("rollback", "--to", "1", "--reason", "the test says so", timeout=120)
    assert holder.pointer(DRAFTER).live.number == 1
    assert serves(beside, 1)
    before = server.counters()
    answers = server.ask_all(PROMPTS[:20])
    check_feedback(beside, answers, "version 1 again")
    records = beside.records()
    assert {r.version for answer in answers for r in record_of(records, answer).rounds} == {1}
    note(acceptance_length_rolled_back=server.counters().since(before).length)


def test_above_temperature_0_the_text_is_the_targets_and_rounds_are_recorded(
    beside: Stack, server: Server, target: Target
) -> None:
    """The wheel's fault would have made it random tokens, each of which the target finds next to impossible."""
    answers = server.ask_all([Prompt("humaneval_code", "Write a short story about a fox.")] * 4, temperature=0.7)
    until(lambda: len([r for r in beside.records() if r.policy == "t0.7"]) >= 4, 30, lambda: tail(server.log))
    records = beside.records()
    for answer in answers:
        record = record_of(records, answer)
        assert [(r.proposed, r.accepted) for r in record.rounds] == steps(answer, record)
    found = [log_probability(target, answer) for answer in answers]
    note(log_probability_of_a_sampled_token=found)
    assert min(found) > SENSIBLE


def log_probability(target: Target, answer: Answer) -> float:
    """Of an answer's tokens under the target, on average."""
    with torch.inference_mode():
        logits = target.model(input_ids=torch.tensor([answer.prompt_ids + answer.tokens])).logits[0].float()
    before = logits[len(answer.prompt_ids) - 1 : -1].log_softmax(-1)
    return float(before.gather(1, torch.tensor(answer.tokens)[:, None]).mean())


def test_the_proposer_had_no_fault_of_its_own(server: Server) -> None:
    said = server.log.read_text(errors="replace")
    assert "vllm.fault" not in said
    assert "vllm.sampling_mended" in said


def test_one_at_a_time_the_text_is_that_of_the_server_without_speculation_token_for_token(
    exactly: dict[bool, list[Answer]],
) -> None:
    """In fp32: a verification is five tokens wide where plain decoding is one, and bf16 shows it."""
    same = [a.tokens == b.tokens for a, b in zip(exactly[False], exactly[True], strict=True)]
    note(alone_fp32_identical=sum(same), of=len(same))
    assert all(same)
