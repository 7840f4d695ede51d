"""What a trainer process needs, built once from the environment, and the running of one adapt job with it."""

import os
from collections.abc import Mapping
from functools import cache

import structlog
import torch
from sqlalchemy import Engine

from adapter.distil import DistilConfig
from adapter.distributed import DistributedConfig, launch
from adapter.drift import DriftConfig
from adapter.gate import GateConfig
from adapter.rescore import RescoreConfig
from adapter.routing import RoutingConfig
from adapter.target import TargetConfig, TargetFiles, fetch, load_embedding
from adapter.versions import Versions
from adapter.watch import WatchConfig
from storage import target_changes
from storage.config import StorageConfig, read, variable
from storage.database import check_migrated, open_database
from storage.decisions import ENGINE
from storage.jobs import Jobs, Lease
from storage.redis_clients import consume
from storage.registry import Drafter, Registry
from storage.stream import FeedbackStream
from storage.weights import WeightsStore
from storage.windows import Windows
from worker.agreement import Agreement
from worker.config import LineageConfig, TrainerConfig, TriggerConfig
from worker.engine_teacher import EngineTeacher, EngineTeacherConfig
from worker.heartbeat import Held, LeaseGone, held, process_name
from worker.pipeline import AdaptConfig, Stores, adapt_once
from worker.rescoring import Rescorer, loading
from worker.routing import Router
from worker.succession import Succession

log = structlog.get_logger()


class TargetChanged(RuntimeError):
    """The target is not the one that the drafter was made for."""


class Learner:
    """Runs adapt jobs. The target's files are found once; of its weights only the embedding stays in memory."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._storage = read(StorageConfig, environ)
        self._trainer = read(TrainerConfig, environ)
        self._config = AdaptConfig(
            trigger=read(TriggerConfig, environ),
            distil=read(DistilConfig, environ),
            gate=read(GateConfig, environ),
            watch=read(WatchConfig, environ),
        )
        torch.set_num_threads(self._trainer.trainer_threads)
        self._database: Engine = open_database(self._storage.sql_url)
        check_migrated(self._database)
        self._jobs = Jobs(self._database)
        self._blobs = WeightsStore(self._storage.weights_folder)
        self._redis = consume(self._storage.stream_url)
        target = read(TargetConfig, environ)
        self._files: TargetFiles = fetch(target)
        rescoring = read(RescoreConfig, environ)
        self._rescorer = Rescorer(loading(target, self._files), rescoring)
        asked = read(EngineTeacherConfig, environ)
        self._engine = EngineTeacher(asked, rescoring.rescore_top_k) if rescoring.teacher == ENGINE else None
        embedding = load_embedding(self._files).to(self._trainer.trainer_device)
        self._versions = Versions(self._blobs, self._files, embedding)
        self._launch = launch(self._versions, self._blobs, read(DistributedConfig, environ))
        drift = read(DriftConfig, environ)
        self._agreement = Agreement(self._database, self._redis, self._versions, self._storage, drift)
        self._lineage = read(LineageConfig, environ)
        self._succession = Succession(Registry(self._database), self._blobs, self._versions)
        self._settle()
        general = environ.get(variable("drafter"), "")
        routing = read(RoutingConfig, environ)
        self._router = Router(self._database, self._blobs, self._versions, routing, general, self._rescorer)

    def _settle(self) -> None:
        """Drafters that a trainer with another target stopped have this one's again."""
        for name, change in target_changes.stopped(self._database).items():
            if change.made_for == self._files.fingerprint:
                target_changes.settle(self._database, name, _me(), ("trainer",))

    def run(self, job_id: int) -> None:
        """Do one job, unless another worker has it. Whatever happens, the job row says how it ended."""
        lease = self._jobs.take(job_id, process_name("trainer"), self._trainer.lease_seconds)
        if lease is None:
            return
        with held(self._jobs, lease, self._trainer.lease_seconds) as still_held:
            try:
                outcome = self._adapt(lease, still_held)
            except LeaseGone as lost:
                log.warning("adapt.abandoned", job=job_id, reason=str(lost))
                return
            except TargetChanged as changed:  # nothing is due for it until its target is back
                log.error("adapt.stopped", job=job_id, reason=str(changed))
                self._jobs.finish(lease, "failed", str(changed))
                return
            except Exception as error:
                log.exception("adapt.failed", job=job_id)
                self._jobs.finish(lease, "failed", f"{type(error).__name__}: {error}")
                raise
        self._jobs.finish(lease, "done", outcome)

    def go_on(self) -> None:
        """Make drafters for this target that go on from those of the target before, where the settings say so."""
        self._settle()
        if self._lineage.new_lineage == "auto":
            self._succession.go_on()

    def replay_plain(self) -> None:
        """Look for drift in requests that were decoded plainly, with the live drafters of this target."""
        self._agreement.look(self._files.fingerprint)

    def route(self) -> None:
        """Score the drafters of this target on new windows, and route workloads by that, where the settings say so."""
        with self._rescorer.reading():
            self._router.look(self._files.fingerprint)

    def _adapt(self, lease: Lease, still_held: Held) -> str:
        drafter = Registry(self._database).drafter(lease.drafter)
        self._check_target(drafter)
        stores = Stores(
            stream=FeedbackStream(
                self._redis, drafter.name, self._storage.stream_length, self._storage.retention_hours
            ),
            windows=Windows(self._database, self._blobs),
            registry=Registry(self._database, lease),
            weights=self._versions,
            lease=lease,
            rescorer=self._rescorer,
            launch=self._launch,
            engine=self._engine,
        )
        with self._rescorer.reading():
            decision = adapt_once(drafter, stores, self._config, still_held)
        return decision.reason if decision else "nothing to decide"

    def _check_target(self, drafter: Drafter) -> None:
        if drafter.target_fingerprint != self._files.fingerprint:
            target_changes.notice(self._database, drafter.name, self._files.fingerprint, "trainer", _me())
            raise TargetChanged(
                f"drafter {drafter.name} was made for target {drafter.target_fingerprint[:12]}, but REDRAFT_TARGET is "
                f"{self._files.fingerprint[:12]}: set REDRAFT_TARGET back, or make a drafter for it with `redraft init`"
            )


def _me() -> str:
    return f"the trainer {process_name('trainer')}"


@cache
def learner() -> Learner:
    """This process's learner."""
    return Learner(os.environ)
