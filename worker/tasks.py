"""The tasks: one that learns, and three that keep house. Each takes an id or nothing, re-reads and re-checks."""

import os
from functools import cache

import structlog

from storage.config import StorageConfig, read
from storage.database import check_migrated, open_database
from storage.redis_clients import consume
from worker.app import DOORBELL_EXPIRES, app
from worker.config import TriggerConfig
from worker.housekeeping import Housekeeper

log = structlog.get_logger()


@cache
def housekeeper() -> Housekeeper:
    """This process's housekeeper, built from the environment."""
    storage = read(StorageConfig, os.environ)
    database = open_database(storage.sql_url)
    check_migrated(database)
    return Housekeeper(database, consume(storage.stream_url), storage, read(TriggerConfig, os.environ))


@app.task(name="worker.tasks.adapt")
def adapt(job_id: int) -> None:
    """Do one adapt job, if it is still to be done and nobody else holds it."""
    from worker.learner import learner  # torch: only where learning happens

    learner().run(job_id)


@app.task(name="worker.tasks.sweep")
def sweep() -> None:
    """Make jobs of due updates, ring again for queued and expired jobs, send what the outbox holds."""
    for job_id in housekeeper().sweep():
        adapt.apply_async((job_id,), expires=DOORBELL_EXPIRES)


@app.task(name="worker.tasks.fold_history")
def fold_history() -> None:
    """Fold new feedback into the acceptance history, each record once."""
    housekeeper().fold_history()


@app.task(name="worker.tasks.collect_garbage")
def collect_garbage() -> None:
    """Delete weights and rows that nothing needs any more."""
    housekeeper().collect_garbage()
