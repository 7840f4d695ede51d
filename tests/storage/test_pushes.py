"""Steps of pushes: where an endpoint stands, what its engine serves, and how long they are kept."""

import pytest
from sqlalchemy import Engine

from storage import pushes as module
from storage.pushes import Pushes, Weights
from storage.registry import Registry
from tests.storage.rows import make_drafter

URL, OTHER = "http://127.0.0.1:8000", "http://127.0.0.1:8001"


def test_an_endpoint_stands_where_its_newest_step_says(engine: Engine) -> None:
    pushes, weights = Pushes(engine), _weights(engine)
    assert pushes.latest(URL) is None
    for state in ("pushing", "paused", "loaded"):
        pushes.note(URL, "run-1", state, weights, "target", "because")
        pushes.note(OTHER, "run-9", "active", weights)
    latest = pushes.latest(URL)
    assert latest is not None
    assert (latest.state, latest.settled, latest.weights, latest.target) == ("loaded", False, weights, "target")
    assert [step.state for step in pushes.steps(URL)] == ["loaded", "paused", "pushing"]


def test_a_refusal_changes_nothing_of_where_it_stands(engine: Engine) -> None:
    pushes, weights = Pushes(engine), _weights(engine)
    pushes.note(URL, "run-1", "active", weights)
    pushes.note(URL, "run-1", "refused", Weights("chat/2", "/b", "cd", None))
    latest = pushes.latest(URL)
    assert latest is not None
    assert latest.state == "active"


def test_what_is_served_is_of_this_run_of_the_engine(engine: Engine) -> None:
    pushes, weights = Pushes(engine), _weights(engine)
    pushes.note(URL, "run-1", "active", weights)
    pushes.note(URL, "run-1", "restoring", Weights("chat/2", "/b", "cd", None))
    served = pushes.served(URL, "run-1")
    assert served is not None
    assert served.weights == weights
    assert pushes.served(URL, "run-2") is None


def test_old_steps_go_and_other_endpoints_keep_theirs(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KEPT", 3)
    pushes, weights = Pushes(engine), _weights(engine)
    pushes.note(OTHER, "run-9", "active", weights)
    for number in range(6):
        pushes.note(URL, "run-1", "active", weights, detail=str(number))
    assert [step.detail for step in pushes.steps(URL)] == ["5", "4", "3"]
    assert len(pushes.steps(OTHER)) == 1


def _weights(engine: Engine) -> Weights:
    return Weights("chat/1", "/a.safetensors", "ab" * 32, make_drafter(Registry(engine)).id)
