"""Jobs: one open per kind and drafter, leases that run out, fences that refuse who was overtaken."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from sqlalchemy import Engine

from storage.jobs import ATTEMPTS, Job, Jobs, Lease, LeaseLost
from storage.registry import Registry
from storage.weights import WeightsStore
from storage.windows import Windows
from tests.storage.rows import DIGEST, make_decision, make_drafter, make_evaluation, make_record, make_training

EXPIRED = -1.0  # a lease of that many seconds has run out when it begins


@pytest.fixture
def jobs(engine: Engine) -> Jobs:
    return Jobs(engine)


def test_a_second_job_is_not_queued_while_one_is_open(jobs: Jobs) -> None:
    job = _request(jobs)
    assert jobs.request("adapt", "chat") is None
    lease = _take(jobs, job)
    assert jobs.request("adapt", "chat") is None
    jobs.finish(lease, "done")
    assert jobs.request("adapt", "chat") is not None


def test_other_kinds_and_other_drafters_are_queued_beside_it(jobs: Jobs) -> None:
    _request(jobs)
    assert jobs.request("fold", "chat") is not None
    assert jobs.request("adapt", "code") is not None


def test_a_job_that_is_held_cannot_be_taken(jobs: Jobs) -> None:
    job = _request(jobs)
    _take(jobs, job)
    assert jobs.take(job.id, "other", 60) is None


def test_of_several_workers_that_take_at_once_one_gets_the_lease(jobs: Jobs) -> None:
    job = _request(jobs)
    leases: list[Lease | None] = []
    threads = [threading.Thread(target=lambda n=n: leases.append(jobs.take(job.id, f"w{n}", 60))) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(lease is not None for lease in leases) == 1
    assert len(leases) == 4


def test_a_lease_that_ran_out_is_taken_over_with_a_higher_fence(jobs: Jobs) -> None:
    job = _request(jobs)
    first = _take(jobs, job, EXPIRED)
    second = _take(jobs, job)
    assert second.fence > first.fence


def test_the_job_is_given_up_after_the_last_attempt(jobs: Jobs) -> None:
    job = _request(jobs)
    for _ in range(ATTEMPTS):
        _take(jobs, job, EXPIRED)
    assert jobs.take(job.id, "other", 60) is None
    given_up = jobs.recent()[0]
    assert given_up.state == "failed"
    assert f"given up after {ATTEMPTS} attempts" in given_up.reason
    assert jobs.due() == []


def test_renewing_keeps_others_out(jobs: Jobs) -> None:
    job = _request(jobs)
    lease = _take(jobs, job, 0.2)
    assert jobs.renew(lease, 60)
    time.sleep(0.3)
    assert jobs.take(job.id, "other", 60) is None


def test_who_was_overtaken_can_neither_renew_nor_finish(jobs: Jobs) -> None:
    job = _request(jobs)
    lost = _take(jobs, job, EXPIRED)
    _take(jobs, job)
    assert not jobs.renew(lost, 60)
    with pytest.raises(LeaseLost, match="no longer held"):
        jobs.finish(lost, "done")


def test_a_finished_job_cannot_be_finished_again(jobs: Jobs) -> None:
    lease = _take(jobs, _request(jobs))
    jobs.finish(lease, "failed", "no feedback")
    with pytest.raises(LeaseLost):
        jobs.finish(lease, "done")
    assert (jobs.recent()[0].state, jobs.recent()[0].reason) == ("failed", "no feedback")


def test_due_are_the_queued_and_those_whose_lease_ran_out(jobs: Jobs) -> None:
    queued, held, expired, finished = (jobs.request(kind, "chat") for kind in ("a", "b", "c", "d"))
    assert queued and held and expired and finished  # noqa: PT018
    _take(jobs, held)
    _take(jobs, expired, EXPIRED)
    jobs.finish(_take(jobs, finished), "done")
    assert jobs.due() == [queued.id, expired.id]


@pytest.mark.parametrize("write", ["add", "fail", "record", "promote", "rollback", "keep", "close"])
def test_every_write_under_a_lost_lease_is_refused_and_nothing_is_kept(
    engine: Engine, jobs: Jobs, tmp_path: Path, write: str
) -> None:
    store = WeightsStore(tmp_path / "weights")
    registry, windows = Registry(engine), Windows(engine, store)
    first = make_drafter(registry)
    window = windows.keep("chat", (make_record("a"),), ())
    assert window is not None
    second = registry.add_candidate(first, DIGEST, 100, window.id, make_training())
    if write in ("rollback", "keep"):
        registry.promote(second, first, "test", "")
        windows.close(window, "promoted")
    before = _everything(registry, windows)
    job = _request(jobs)
    lost = _take(jobs, job, EXPIRED)
    _take(jobs, job)
    held = Registry(engine, lost)
    writes: dict[str, Callable[[], object]] = {
        "add": lambda: held.add_candidate(second, DIGEST, 1, window.id, make_training()),
        "fail": lambda: held.record_training_failure(first, window.id, make_training("failed")),
        "record": lambda: held.record(second, make_evaluation(), make_decision(True)),
        "promote": lambda: held.promote(second, first, "test", ""),
        "rollback": lambda: held.rollback("chat", None, "test", ""),
        "keep": lambda: windows.keep("chat", (make_record("b"),), (), lost),
        "close": lambda: windows.close(window, "promoted", lost),
    }
    with pytest.raises(LeaseLost):
        writes[write]()
    assert _everything(registry, windows) == before


def test_writes_under_a_lease_that_is_held_go_through(engine: Engine, jobs: Jobs, tmp_path: Path) -> None:
    lease = _take(jobs, _request(jobs))
    registry, windows = Registry(engine, lease), Windows(engine, WeightsStore(tmp_path / "weights"))
    first = make_drafter(registry)
    window = windows.keep("chat", (make_record("a"),), (), lease)
    assert window is not None
    second = registry.add_candidate(first, DIGEST, 100, window.id, make_training())
    assert registry.promote(second, first, "test", "").live == second


def _everything(registry: Registry, windows: Windows) -> tuple[object, ...]:
    return registry.versions("chat"), registry.pointer("chat"), windows.recent("chat", 9), windows.known("ab")


def _request(jobs: Jobs) -> Job:
    job = jobs.request("adapt", "chat")
    assert job is not None
    return job


def _take(jobs: Jobs, job: Job, seconds: float = 60) -> Lease:
    lease = jobs.take(job.id, "worker", seconds)
    assert lease is not None
    return lease
