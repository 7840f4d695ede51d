"""The whole application: which routes are open, health, metrics, and what it costs to reach it wrongly."""

import http.client
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi import FastAPI
from openai import OpenAI
from sqlalchemy import Engine as Database

from adapter.target import Target
from service.app import ServeConfig, build_app
from service.engine.engine import Engine
from service.metrics import Metrics
from storage.database import migrate, open_database
from tests.service.conftest import CONFIG, VERSION
from tests.service.serving import call, running

OPEN = {
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/models",
    "/v1/models/{name}",
    "/health",
    "/health/live",
    "/health/ready",
    "/metrics",
}
"""The routes that need no key. A route that is not named here must refuse whoever has none."""


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Database]:
    database = open_database(f"sqlite:///{tmp_path_factory.mktemp('app')}/redraft.db")
    migrate(database)
    yield database
    database.dispose()


@pytest.fixture(scope="module")
def app(tiny_target: Target, decoder: Engine, database: Database) -> FastAPI:
    config = ServeConfig(model_name="tiny", body_limit=4096)
    return build_app(tiny_target, decoder, Metrics(), database, lambda: "chat", config)


@pytest.fixture(scope="module")
def address(app: FastAPI) -> Iterator[str]:
    with running(app) as address:
        yield address


def test_every_route_that_is_not_open_needs_a_key(app: FastAPI, address: str) -> None:
    operations = [(path, method) for path, methods in app.openapi()["paths"].items() for method in methods]
    guarded = [(path, method) for path, method in operations if path not in OPEN]
    assert len(guarded) >= 7
    for path, method in guarded:
        body = {"version": 1, "reason": "no key"} if method == "post" else None
        status, _ = call(address, method.upper(), re.sub(r"\{\w+\}", "1", path), body)
        assert status == 401, f"{method} {path}"


def test_no_route_is_hidden_from_the_list_that_the_test_above_walks(app: FastAPI) -> None:
    listed = set(app.openapi()["paths"]) | {"/openapi.json"}
    assert set(paths(app)) == listed


def paths(app: FastAPI) -> Iterator[str]:
    """The path of everything that is mounted, as the list writes it."""
    for route in app.routes:
        included = getattr(route, "effective_route_contexts", None)
        for found in included() if included else [route]:
            path: str = getattr(found, "path")  # noqa: B009 (starlette's base class does not declare it)
            yield path.replace(":path}", "}")


def test_health_says_what_is_served(address: str) -> None:
    for path in ("/health", "/health/live", "/health/ready"):
        status, data = call(address, "GET", path)
        assert (status, json.loads(data)["status"]) == (200, "ok")
        assert json.loads(data)["live_version"] == VERSION


def test_an_engine_that_has_stopped_is_neither_live_nor_ready(tiny_target: Target, database: Database) -> None:
    engine = Engine(tiny_target, CONFIG, lambda generation: None)
    engine.start()
    with running(build_app(tiny_target, engine, Metrics(), database, lambda: "chat", ServeConfig())) as address:
        assert call(address, "GET", "/health/ready")[0] == 200
        engine.stop()
        assert call(address, "GET", "/health/ready")[0] == 503
        assert call(address, "GET", "/health/live")[0] == 503


def test_the_database_is_not_asked_for_health_or_text(tiny_target: Target, decoder: Engine, tmp_path: Path) -> None:
    away = open_database(f"sqlite:///{tmp_path}/nothing.db")
    app = build_app(tiny_target, decoder, Metrics(), away, "chat", ServeConfig(model_name="tiny"))
    with running(app) as address, OpenAI(base_url=f"{address}/v1", api_key="unused") as client:
        assert call(address, "GET", "/health/ready")[0] == 200
        answer = client.completions.create(model="tiny", prompt="Hello", max_tokens=3, temperature=0)
    assert answer.choices[0].finish_reason in {"stop", "length"}


def test_metrics_are_in_prometheus_text_format(address: str) -> None:
    status, data = call(address, "GET", "/metrics")
    assert status == 200
    assert b"# TYPE redraft_requests_total counter" in data


def test_a_body_over_the_limit_is_refused(address: str) -> None:
    body = {"model": "tiny", "prompt": "x" * 5000}
    status, data = call(address, "POST", "/v1/completions", body)
    assert (status, json.loads(data)["error"]["type"]) == (413, "invalid_request_error")


def test_a_body_that_does_not_say_its_length_is_cut_off_at_the_limit(address: str) -> None:
    pieces = iter([b'{"model": "tiny", "prompt": "', *[b"x" * 1000] * 5, b'"}'])
    connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=60)
    headers = {"Content-Type": "application/json", "Transfer-Encoding": "chunked"}
    connection.request("POST", "/v1/completions", pieces, headers, encode_chunked=True)
    response = connection.getresponse()
    assert (response.status, json.loads(response.read())["error"]["type"]) == (413, "invalid_request_error")
    connection.close()


def test_a_path_that_is_not_there_is_refused_in_openais_form(address: str) -> None:
    status, data = call(address, "GET", "/v1/embeddings")
    assert (status, json.loads(data)["error"]["type"]) == (404, "not_found_error")


def test_a_fault_of_ours_is_an_error_that_shows_nothing(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise RuntimeError("secret words")

    monkeypatch.setattr("service.openai_api.completion_ids", fail)
    status, data = call(address, "POST", "/v1/completions", {"model": "tiny", "prompt": "x"})
    assert (status, json.loads(data)["error"]["type"]) == (500, "server_error")
    assert b"secret" not in data


def test_the_model_is_called_as_the_target_unless_told_otherwise(
    tiny_target: Target, decoder: Engine, database: Database
) -> None:
    with running(build_app(tiny_target, decoder, Metrics(), database, lambda: "chat", ServeConfig())) as address:
        _, data = call(address, "GET", "/v1/models")
    assert [model["id"] for model in json.loads(data)["data"]] == [tiny_target.files.name]


def test_the_server_listens_on_loopback_unless_told_otherwise() -> None:
    assert ServeConfig().host == "127.0.0.1"


def test_an_address_that_means_everywhere_is_no_name_of_ours() -> None:
    assert ServeConfig(host="0.0.0.0", hosts="Redraft.Internal, other").names == {"redraft.internal", "other"}
    assert ServeConfig(host="10.0.0.5").names == {"10.0.0.5"}
