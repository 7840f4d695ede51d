"""The Celery application: `celery -A worker.app`. A message is a doorbell; what is to be done stands in SQL.

Early acknowledgement, no prefetch, JSON only, no result backend: with Celery 5.7 on Redis, late
acknowledgement runs tasks twice after a connection reset, and ends the worker after a broker restart.
"""

import os
import threading
from typing import Any

from celery import Celery, signals

from adapter.routing import RoutingConfig
from storage.config import StorageConfig, read
from storage.redis_clients import celery_broker
from worker.config import TrainerConfig

ADAPT_QUEUE = "adapt"
TRAINING = ("adapt", "replay_plain", "route", "go_on")  # the trainer's tasks
HOUSEKEEPING_QUEUE = "housekeeping"
DOORBELL_EXPIRES = 60  # seconds; the sweep rings again, so an old doorbell is worth nothing
HEARTBEAT_SECONDS = 5.0


def build_app(storage: StorageConfig, trainer: TrainerConfig, routing: RoutingConfig) -> Celery:
    """The configured application; the tasks are in `worker.tasks`."""
    app = Celery("redraft", broker=celery_broker(storage.stream_url), include=["worker.tasks"])
    app.conf.update(
        accept_content=["json"],
        task_serializer="json",
        task_ignore_result=True,
        task_acks_late=False,
        worker_disable_prefetch=True,
        worker_hijack_root_logger=False,
        broker_connection_retry_on_startup=True,
        broker_transport_options={"visibility_timeout": 3600},
        task_routes={f"worker.tasks.{name}": {"queue": ADAPT_QUEUE} for name in TRAINING},
        task_default_queue=HOUSEKEEPING_QUEUE,
        beat_schedule={
            "sweep": _every("worker.tasks.sweep", trainer.sweep_seconds),
            "fold_history": _every("worker.tasks.fold_history", trainer.fold_seconds),
            "watch": _every("worker.tasks.watch", trainer.watch_seconds),
            "collect_garbage": _every("worker.tasks.collect_garbage", 3600.0),
        },
    )
    if routing.routing == "learned":
        app.conf.beat_schedule["route"] = _every("worker.tasks.route", routing.routing_seconds)
    return app


def _every(task: str, seconds: float) -> dict[str, Any]:
    # A message that was not taken within its interval expires, so that none pile up while nobody works.
    return {"task": task, "schedule": seconds, "options": {"expires": max(seconds, 1.0)}}


@signals.worker_ready.connect
def _worker_ready(sender: Any, **_: Any) -> None:
    queues = sender.app.amqp.queues.consume_from
    _start_heartbeat("trainer" if ADAPT_QUEUE in queues else "housekeeper")


@signals.beat_init.connect
def _beat_ready(**_: Any) -> None:
    _start_heartbeat("beat")


def _start_heartbeat(role: str) -> None:
    """Say in SQL, from a thread of its own, that this process lives: a solo trainer is busy for minutes."""
    from worker.heartbeat import beat_forever

    threading.Thread(target=beat_forever, args=(role, HEARTBEAT_SECONDS), name="heartbeat", daemon=True).start()


app = build_app(read(StorageConfig, os.environ), read(TrainerConfig, os.environ), read(RoutingConfig, os.environ))
