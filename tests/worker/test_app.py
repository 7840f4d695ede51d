"""The Celery application: what beat rings for, and which process takes it."""

from pathlib import Path

import pytest

from adapter.routing import RoutingConfig
from storage.config import StorageConfig
from worker.app import ADAPT_QUEUE, build_app
from worker.config import TrainerConfig


@pytest.mark.parametrize(("routing", "scheduled"), [("off", False), ("label", False), ("learned", True)])
def test_routing_is_rung_for_only_where_it_is_learned(tmp_path: Path, routing: str, scheduled: bool) -> None:
    config = RoutingConfig(routing=routing, routing_seconds=7.0)  # type: ignore[arg-type]
    schedule = build_app(StorageConfig(home=tmp_path), TrainerConfig(), config).conf.beat_schedule
    assert ("route" in schedule) == scheduled
    if scheduled:
        assert (schedule["route"]["task"], schedule["route"]["schedule"]) == ("worker.tasks.route", 7.0)


def test_what_needs_torch_goes_to_the_trainer(tmp_path: Path) -> None:
    app = build_app(StorageConfig(home=tmp_path), TrainerConfig(), RoutingConfig())
    routed = {name for name, to in app.conf.task_routes.items() if to["queue"] == ADAPT_QUEUE}
    assert routed == {f"worker.tasks.{name}" for name in ("adapt", "replay_plain", "route", "go_on")}
