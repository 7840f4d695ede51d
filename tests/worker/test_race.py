"""Many drafters and many trainers on one database and one broker: each update is done once, by one of them."""

import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
import torch
from sqlalchemy import Engine, func, select

from adapter.drafters.causal_lm import CausalLM
from adapter.target import Target
from adapter.versions import Versions
from storage.database import open_database, reading
from storage.jobs import Job, Jobs
from storage.records import FeedbackRecord, encode
from storage.redis_clients import consume
from storage.registry import Registry
from storage.stream import FeedbackStream
from storage.tables import TrainingRow
from storage.weights import WeightsStore
from storage.windows import Windows
from tests.adapter.feedback import served
from tests.circle import tiny_first
from tests.valkey_fixture import ValkeyServer
from tests.waiting import PATIENCE, until
from tests.worker.environment import trainer_environ
from worker.learner import Learner

DRAFTERS = ("code", "chat", "sql")
TRAINERS = 4
RECORDS = 12


@dataclass
class Place:
    """Three drafters, each with an update's worth of feedback waiting and a job that asks for it."""

    environ: dict[str, str]
    database: Engine
    windows: Windows
    jobs: list[Job]

    def settled(self) -> None:
        """Every job was taken once and done; every drafter has one new version of one window with every record."""
        states = [(job.state, job.attempts) for job in Jobs(self.database).recent()]
        assert states == [("done", 1)] * len(DRAFTERS), Jobs(self.database).recent()
        with reading(self.database) as session:
            assert session.scalar(select(func.count()).select_from(TrainingRow)) == len(DRAFTERS)
        for name in DRAFTERS:
            numbers = [s.version.number for s in Registry(self.database).versions(name)]
            assert numbers == [1, 2]
            (window,) = self.windows.recent(name, 10)
            assert (window.state, window.training + window.holdout) == ("closed", RECORDS)


@pytest.fixture
def place(
    target: Target, target_dir: Path, answered: list[FeedbackRecord], database_url: str, valkey: ValkeyServer,
    tmp_path: Path,
) -> Iterator[Place]:  # fmt: skip
    database = open_database(database_url)
    store = WeightsStore(tmp_path / "weights")
    first = tiny_first(target)
    redis = consume(valkey.url)
    jobs = []
    for name in DRAFTERS:
        _make(name, target, database, Versions(store, target.files, target.embedding), first)
        named = (msgspec.structs.replace(served(first, answer), drafter=name) for answer in answered[:RECORDS])
        FeedbackStream(redis, name).append([encode(_numbered(record, n)) for n, record in enumerate(named)])
        job = Jobs(database).request("adapt", name)
        assert job is not None
        jobs.append(job)
    environ = {
        **trainer_environ(tmp_path, database_url, valkey, target_dir),
        "REDRAFT_WINDOW_RECORDS": str(RECORDS),
        "REDRAFT_EPOCHS": "1",
        "REDRAFT_TRAINER_NICE": "0",
    }
    yield Place(environ, database, Windows(database, store), jobs)
    redis.close()
    database.dispose()


def _numbered(record: FeedbackRecord, n: int) -> FeedbackRecord:
    return msgspec.structs.replace(record, record_id=f"{record.drafter}-{n}", request_id=f"{record.drafter}-{n}")


def _make(name: str, target: Target, database: Engine, versions: Versions, first: CausalLM) -> None:
    blob, files, config = versions.save(first), target.files, first.config.to_dict()
    Registry(database).create_drafter(
        name, first.kind, files.fingerprint, files.tokenizer_fingerprint, config, blob.sha256, blob.size, "test"
    )


def test_trainers_that_are_all_rung_for_every_job_do_each_once(place: Place) -> None:
    """Each goes through all jobs, again and again, in an order of its own, from the same moment on."""
    learners = [Learner(place.environ) for _ in range(TRAINERS)]
    together, failures = threading.Barrier(TRAINERS), list[BaseException]()

    def work(n: int) -> None:
        try:
            together.wait()
            for lap in range(3):
                for job in place.jobs[(n + lap) % 3 :] + place.jobs[: (n + lap) % 3]:
                    learners[n].run(job.id)
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(TRAINERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    place.settled()
    assert torch.get_num_threads() == 1


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_a_trainer_whose_settings_say_so_has_several_processes_share_an_update(place: Place) -> None:
    Learner({**place.environ, "REDRAFT_TRAINER_PROCESSES": "2", "REDRAFT_TRAINER_SHARDED": "true"}).run(
        place.jobs[0].id
    )
    registry = Registry(place.database)
    run = registry.training(registry.version(DRAFTERS[0], 2))
    assert run is not None
    assert (run.outcome, run.machine["processes"], run.machine["sharded"]) == ("trained", 2, True)


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_two_celery_workers_on_one_broker_do_each_update_once(place: Place, tmp_path: Path) -> None:
    """Real processes, with three doorbells for every job."""
    workers = [_worker(place, tmp_path / f"worker{n}.log", f"w{n}") for n in range(2)]
    try:
        _ring(place, times=3)
        until(
            lambda: not all(worker.poll() is None for worker in workers) or _over(place), lambda: _logs(tmp_path), 300
        )
        assert all(worker.poll() is None for worker in workers), _logs(tmp_path)
        time.sleep(1.0)  # for the doorbells that are left
    finally:
        for worker in workers:
            worker.terminate()
        for worker in workers:
            worker.wait(PATIENCE)
    place.settled()
    holders = Counter(job.holder for job in Jobs(place.database).recent())
    assert sum(holders.values()) == len(DRAFTERS)


def _worker(place: Place, log: Path, name: str) -> "subprocess.Popen[bytes]":
    command = [
        sys.executable,
        "-m",
        "celery",
        "-A",
        "worker.app",
        "worker",
        "--pool",
        "solo",
        "-Q",
        "adapt",
        "-n",
        name,
    ]
    with log.open("wb") as output:
        return subprocess.Popen(command, env=_environment(place), stdout=output, stderr=subprocess.STDOUT)


def _over(place: Place) -> bool:
    return not any(job.state in ("queued", "running") for job in Jobs(place.database).recent())


def _ring(place: Place, times: int) -> None:
    """From a process of its own, as the sweep's are: the tasks' application reads its environment on import."""
    code = f"from worker.tasks import adapt\nfor id in {[job.id for job in place.jobs] * times}: adapt.delay(id)"
    subprocess.run([sys.executable, "-c", code], env=_environment(place), check=True, timeout=PATIENCE)


def _environment(place: Place) -> dict[str, str]:
    return {**os.environ, **place.environ, "PYTHONPATH": str(Path(__file__).parents[2])}


def _logs(folder: Path) -> str:
    return "\n".join(log.read_text(errors="replace")[-2000:] for log in folder.glob("worker*.log"))
