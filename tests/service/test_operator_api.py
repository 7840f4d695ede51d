"""The operator's routes over a real socket and a real database, of both kinds."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from sqlalchemy import Engine

from service import openai_errors, operator_api
from service.engine.governor import Governor, GovernorConfig, RowClass
from service.engine.shapes import Shapes
from service.guard import Guard
from service.operator_api import operator_router
from storage.access import ensure_operator_key
from storage.database import open_database
from storage.history import fold
from storage.registry import Registry
from storage.servers import Servers
from storage.weights import WeightsStore
from tests.service.engine.machine import Machine, governed
from tests.service.serving import call, running
from tests.storage.rows import (
    make_candidate,
    make_decision,
    make_drafter,
    make_evaluation,
    make_record,
    make_round,
)

Ask = Callable[..., tuple[int, Any]]
HOSTS = frozenset({"redraft.internal"})


def app(database: Engine, governor: Governor | None = None) -> FastAPI:
    app = FastAPI()
    openai_errors.install(app)
    operator_api.install(app)
    app.include_router(operator_router(database, lambda: "chat", Guard(database, HOSTS), governor))
    return app


@pytest.fixture
def key(engine: Engine, tmp_path: Path) -> str:
    path = ensure_operator_key(engine, tmp_path)
    assert path is not None
    return path.read_text().strip()


@pytest.fixture
def registry(engine: Engine, tmp_path: Path) -> Registry:
    """A drafter with version 1 live and versions 2 and 3 as candidates; the gate refused 3."""
    registry, store = Registry(engine), WeightsStore(tmp_path / "weights")
    first = make_drafter(registry)
    second, third = make_candidate(registry, store, first, "a"), make_candidate(registry, store, first, "b")
    registry.record(second, make_evaluation(), make_decision(True))
    registry.record(third, make_evaluation(-0.1), make_decision(False, "the gain is not above the margin"))
    return registry


@pytest.fixture
def address(engine: Engine, registry: Registry) -> Iterator[str]:
    with running(app(engine)) as address:
        yield address


@pytest.fixture
def ask(address: str, key: str) -> Ask:
    """Send a request with the operator's key and what other headers are given."""

    def ask(method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        given = {name.replace("_", "-"): text for name, text in headers.items()}
        status, data = call(address, method, path, body, {"Authorization": f"Bearer {key}", **given})
        return status, json.loads(data)

    return ask


def test_versions_are_listed_with_state_reason_and_scores(ask: Ask) -> None:
    status, answer = ask("GET", "/redraft/versions")
    assert status == 200
    assert answer["pointer"] == {
        "drafter": "chat", "generation": 1, "live": 1, "previous": None, "canary": None,
    }  # fmt: skip
    states = {v["version"]["number"]: v["state"] for v in answer["versions"]}
    assert states == {1: "live", 2: "candidate", 3: "refused"}
    refused = answer["versions"][2]
    assert refused["reason"] == "the gain is not above the margin"
    assert refused["evaluation"]["overall"]["gain"] == -0.1


def test_one_version_is_shown_with_its_training_and_when_it_was_live(ask: Ask) -> None:
    assert ask("POST", "/redraft/promote", {"version": 2, "reason": "better"})[0] == 200
    _, answer = ask("GET", "/redraft/versions/2")
    assert (answer["state"], answer["training"]["seed"]) == ("live", 7)
    assert [interval["ended_at"] for interval in answer["live"]] == [None]


def test_a_version_that_is_not_there_is_not_found(ask: Ask) -> None:
    status, answer = ask("GET", "/redraft/versions/9")
    assert status == 404
    assert "1 to 3" in answer["error"]["message"]


def test_promotion_moves_the_pointer_and_is_in_the_events(ask: Ask, registry: Registry) -> None:
    status, answer = ask("POST", "/redraft/promote", {"version": 2, "reason": "better on sql"})
    assert (status, answer) == (200, {"drafter": "chat", "generation": 2, "live": 2, "previous": 1, "canary": None})
    assert registry.live("chat").number == 2
    _, events = ask("GET", "/redraft/events?limit=1")
    assert [(e["kind"], e["reason"], e["actor"]) for e in events["events"]] == [
        ("promote", "better on sql", "operator")
    ]


def test_rollback_goes_to_the_version_before_or_to_the_named_one(ask: Ask, registry: Registry) -> None:
    ask("POST", "/redraft/promote", {"version": 2, "reason": "better"})
    status, answer = ask("POST", "/redraft/rollback", {"reason": "slower"})
    assert (status, answer["live"], answer["generation"]) == (200, 1, 3)
    status, answer = ask("POST", "/redraft/rollback", {"to": 2, "reason": "it was not"})
    assert (status, answer["live"], answer["generation"]) == (200, 2, 4)


def test_rollback_of_the_first_version_is_a_conflict(ask: Ask, registry: Registry) -> None:
    status, answer = ask("POST", "/redraft/rollback", {"reason": "?"})
    assert (status, answer["error"]["type"]) == (409, "conflict_error")
    assert registry.pointer("chat").generation == 1


@pytest.mark.parametrize(
    "body",
    [
        {"version": 2},
        {"version": 2, "reason": ""},
        {"version": "2", "reason": "x"},
        {"version": 0, "reason": "x"},
        {"version": 2, "reason": "x", "force": True},
    ],
)
def test_an_order_without_a_version_and_a_reason_is_refused(ask: Ask, registry: Registry, body: dict[str, Any]) -> None:
    status, _ = ask("POST", "/redraft/promote", body)
    assert status == 400
    assert registry.live("chat").number == 1


def test_history_holds_the_figures_of_each_version_under_their_own_names(ask: Ask, engine: Engine) -> None:
    rounds = (make_round(1, 4, 4), make_round(1, 4, 1))
    fold(engine, [make_record("x", rounds), make_record("y", rounds)])
    status, answer = ask("GET", "/redraft/history")
    assert status == 200
    (total,) = answer["totals"]
    assert (total["version"], total["requests"], total["k"]) == (1, 2, 4)
    assert total["acceptance_rate"] == 10 / 16
    assert total["acceptance_length"] == 1 + 10 / 4
    assert ask("GET", "/redraft/history?hours=0")[0] == 400


def test_servers_say_whether_they_have_applied_the_newest_move(ask: Ask, engine: Engine) -> None:
    Servers(engine).beat("a", "reference", "chat", 1, 1)
    Servers(engine).beat("b", "reference", "chat", 0, 0, "version 1: damaged")
    _, answer = ask("GET", "/redraft/servers")
    applied = {s["id"]: (s["applied"], s["error"]) for s in answer["servers"]}
    assert applied == {"a": (True, ""), "b": (False, "version 1: damaged")}


def test_the_governor_says_what_it_chose_and_what_plain_decoding_would_give(engine: Engine, key: str) -> None:
    governor = Governor(Shapes(4), GovernorConfig())
    governed(Machine(lambda _, row_class: 0.8), governor, [RowClass("sql", "greedy")] * 2, 200)
    with running(app(engine, governor)) as address:
        status, data = call(address, "GET", "/redraft/governor", headers={"Authorization": f"Bearer {key}"})
        assert call(address, "GET", "/redraft/governor")[0] == 401
    answer = json.loads(data)
    assert (status, answer["on"]) == (200, True)
    (decision,) = answer["decisions"]
    assert (decision["workload"], decision["policy"], decision["batch"]) == ("sql", "greedy", 2)
    assert decision["draft_length"] > 0
    assert decision["speed_up"] == decision["speculative_progress"] / decision["plain_progress"] > 1.5
    assert len(decision["survival"]) == 4


def test_a_server_without_a_governor_says_so(ask: Ask) -> None:
    assert ask("GET", "/redraft/governor") == (200, {"on": False, "decisions": []})


@pytest.mark.parametrize("authorization", [None, "", "Bearer ", "Bearer rdk_guess", "Basic {key}", "{key}"])
def test_without_the_operator_key_nothing_is_shown_or_moved(
    address: str, key: str, registry: Registry, authorization: str | None
) -> None:
    headers = {} if authorization is None else {"Authorization": authorization.format(key=key)}
    assert call(address, "GET", "/redraft/versions", None, headers)[0] == 401
    order = {"version": 2, "reason": "mine"}
    assert call(address, "POST", "/redraft/promote", order, headers)[0] == 401
    assert registry.live("chat").number == 1


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.example"},
        {"Host": "127.0.0.1.evil.example:8765"},
        {"Host": ""},
        {"Host": "[::1"},
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Sec_Fetch_Site": "cross-site"},
        {"Sec_Fetch_Site": "same-site"},
    ],
)
def test_a_page_of_another_site_cannot_move_the_pointer(ask: Ask, registry: Registry, headers: dict[str, str]) -> None:
    status, _ = ask("POST", "/redraft/promote", {"version": 2, "reason": "drive-by"}, **headers)
    assert status == 403
    assert registry.live("chat").number == 1


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "localhost:1"},
        {"Host": "[::1]:8765"},
        {"Host": "redraft.internal"},
        {"Host": "Redraft.Internal:80", "Origin": "http://Redraft.Internal:80", "Sec_Fetch_Site": "same-origin"},
    ],
)
def test_a_name_of_ours_is_let_through(ask: Ask, headers: dict[str, str]) -> None:
    assert ask("GET", "/redraft/versions", **headers)[0] == 200


def test_a_body_that_a_form_could_send_is_refused(ask: Ask, registry: Registry) -> None:
    body = b'{"version": 2, "reason": "a form"}'
    assert ask("POST", "/redraft/promote", body, Content_Type="text/plain")[0] == 400
    assert registry.live("chat").number == 1


def test_a_database_that_is_away_is_said_to_be(tmp_path: Path) -> None:
    with running(app(open_database(f"sqlite:///{tmp_path}/empty.db"))) as address:
        status, data = call(address, "GET", "/redraft/versions", headers={"Authorization": "Bearer rdk_x"})
    assert status == 503
    assert "serving goes on" in json.loads(data)["error"]["message"]


def test_a_version_in_quarantine_is_promoted_only_where_the_order_says_so(ask: Ask, registry: Registry) -> None:
    ask("POST", "/redraft/promote", {"version": 2, "reason": "better"})
    registry.take_back(registry.version("chat", 2), "watch", "worse by 0.1")
    status, answer = ask("POST", "/redraft/promote", {"version": 2, "reason": "again"})
    assert status == 409
    assert "quarantine" in answer["error"]["message"]
    order = {"version": 2, "reason": "it was the traffic", "quarantined": True}
    assert ask("POST", "/redraft/promote", order)[0] == 200
    assert registry.live("chat").number == 2


def test_watches_are_listed_with_their_findings(ask: Ask, registry: Registry) -> None:
    registry.promote(registry.version("chat", 2), registry.live("chat"), "worker", "better", holdback=0.2)
    _, answer = ask("GET", "/redraft/watch")
    (watch,) = answer["watches"]
    assert (watch["version"], watch["predecessor"], watch["share"], watch["state"]) == (2, 1, 0.2, "open")
