"""The tasks: four for the trainer, and four that keep house. Each takes an id or nothing, re-reads and re-checks."""

import os
from functools import cache

import structlog

from adapter.drift import DriftConfig
from adapter.watch import WatchConfig
from storage.config import StorageConfig, read
from storage.database import check_migrated, open_database
from storage.redis_clients import consume
from storage.retention import RetentionConfig
from worker.app import DOORBELL_EXPIRES, app
from worker.config import TriggerConfig
from worker.housekeeping import Housekeeper
from worker.watching import Watcher

log = structlog.get_logger()

REPLAY_EXPIRES = 10  # seconds; a trainer that is busy learning replays nothing meanwhile


@cache
def housekeeper() -> Housekeeper:
    """This process's housekeeper, built from the environment."""
    storage = read(StorageConfig, os.environ)
    database = open_database(storage.sql_url)
    check_migrated(database)
    trigger, drift = read(TriggerConfig, os.environ), read(DriftConfig, os.environ)
    kept = read(RetentionConfig, os.environ)
    return Housekeeper(database, consume(storage.stream_url), storage, trigger, drift, kept)


@cache
def watcher() -> Watcher:
    """This process's watcher, built from the environment."""
    database = open_database(read(StorageConfig, os.environ).sql_url)
    check_migrated(database)
    return Watcher(database, read(WatchConfig, os.environ))


@app.task(name="worker.tasks.adapt")
def adapt(job_id: int) -> None:
    """Do one adapt job, if it is still to be done and nobody else holds it."""
    from worker.learner import learner  # torch: only where learning happens

    learner().run(job_id)


@app.task(name="worker.tasks.replay_plain")
def replay_plain() -> None:
    """Look for drift in requests that were decoded plainly."""
    from worker.learner import learner  # torch

    learner().replay_plain()


@app.task(name="worker.tasks.route")
def route() -> None:
    """Score the drafters on new windows, and route workloads by that."""
    from worker.learner import learner  # torch

    learner().route()


@app.task(name="worker.tasks.go_on")
def go_on() -> None:
    """Go on for a target that has changed under a drafter, where the settings say so."""
    from worker.learner import learner  # torch

    learner().go_on()


@app.task(name="worker.tasks.sweep")
def sweep() -> None:
    """Make jobs of due updates, ring again for queued and expired jobs, send what the outbox holds."""
    for job_id in housekeeper().sweep():
        adapt.apply_async((job_id,), expires=DOORBELL_EXPIRES)
    if housekeeper().target_changed:
        go_on.apply_async(expires=REPLAY_EXPIRES)


@app.task(name="worker.tasks.fold_history")
def fold_history() -> None:
    """Fold new feedback into the acceptance history, each record once, and look for drift in it."""
    housekeeper().fold_history()
    if housekeeper().saw_plain:
        replay_plain.apply_async(expires=REPLAY_EXPIRES)


@app.task(name="worker.tasks.watch")
def watch() -> None:
    """Judge versions that were just promoted against their predecessors, and take back what is worse."""
    watcher().look()
    housekeeper().send_outbox()


@app.task(name="worker.tasks.collect_garbage")
def collect_garbage() -> None:
    """Delete weights and rows that nothing needs any more."""
    housekeeper().collect_garbage()
