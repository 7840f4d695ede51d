"""Signs of life of the worker's processes, and the lease of a trainer at work."""

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import structlog
from sqlalchemy.exc import SQLAlchemyError

from storage.config import StorageConfig, read
from storage.database import open_database
from storage.jobs import Jobs, Lease
from storage.servers import Servers

log = structlog.get_logger()


class LeaseGone(RuntimeError):
    """The lease ran out while this process was silent: another worker has the job, so this one stops."""


def process_name(role: str) -> str:
    return f"{role}:{socket.gethostname()}:{os.getpid()}"


def beat_forever(role: str, seconds: float) -> None:
    """Write this process's sign of life every few seconds, for as long as it lives."""
    servers = Servers(open_database(read(StorageConfig, os.environ).sql_url))
    while True:
        try:
            servers.beat(process_name(role), role, drafter="", generation=0, version=0)
        except SQLAlchemyError as error:
            log.warning("heartbeat.failed", role=role, error=type(error).__name__)
        time.sleep(seconds)


class Held:
    """A lease that is renewed in the background; call it to stop where the lease is lost."""

    def __init__(self, jobs: Jobs, lease: Lease, seconds: float) -> None:
        self._jobs, self._lease, self._seconds = jobs, lease, seconds
        self._over = threading.Event()
        self._lost = False

    def __call__(self) -> None:
        if self._lost:
            raise LeaseGone(f"job {self._lease.job_id}: the lease is lost")

    def keep(self) -> None:
        while not self._over.wait(self._seconds / 3):
            try:
                self._lost = self._lost or not self._jobs.renew(self._lease, self._seconds)
            except SQLAlchemyError as error:
                log.warning("lease.renewal_failed", job=self._lease.job_id, error=type(error).__name__)

    def release(self) -> None:
        self._over.set()


@contextmanager
def held(jobs: Jobs, lease: Lease, seconds: float) -> Iterator[Held]:
    """Renew `lease` every third of its time for as long as the block runs."""
    keeper = Held(jobs, lease, seconds)
    thread = threading.Thread(target=keeper.keep, name="lease", daemon=True)
    thread.start()
    try:
        yield keeper
    finally:
        keeper.release()
        thread.join()
