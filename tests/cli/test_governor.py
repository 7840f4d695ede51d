"""`redraft governor` against an operator's API on a socket: why speculation is on or off, at a glance."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from fastapi import FastAPI
from sqlalchemy import Engine

from service.engine.governor import Governor, GovernorConfig, RowClass
from service.engine.shapes import Shapes
from service.guard import Guard
from service.openai_errors import install
from service.operator_api import operator_router
from storage.access import KEY_FILE, ensure_operator_key
from tests.cli.conftest import Run
from tests.service.engine.machine import Machine, governed
from tests.service.serving import running

SQL, CHAT = RowClass("sql", "greedy"), RowClass("chat", "t0.8")


@contextmanager
def serving(database: Engine, governor: Governor | None) -> Iterator[str]:
    app = FastAPI()
    install(app)
    app.include_router(operator_router(database, lambda: "chat", Guard(database, frozenset()), governor))
    with running(app) as address:
        yield address


@pytest.fixture
def governor() -> Governor:
    """It has seen that speculation pays for sql and not for chat."""
    governor = Governor(Shapes(4), GovernorConfig())
    machine = Machine(lambda _, row_class: 0.9 if row_class == SQL else 0.05)
    for row_class in (SQL, CHAT):
        governed(machine, governor, [row_class] * 8, 302)
    return governor


@pytest.fixture(autouse=True)
def key(database: Engine, home: Path) -> None:
    ensure_operator_key(database, home)


def test_each_line_says_the_choice_why_and_what_plain_decoding_gives(
    redraft: Run, database: Engine, governor: Governor
) -> None:
    with serving(database, governor) as address:
        result = redraft("governor", "--url", address)
    assert result.exit_code == 0, result.stderr
    lines = {line.split()[0]: " ".join(line.split()) for line in result.stdout.splitlines() if line.split()}
    assert lines["sql"].startswith("sql greedy 8 4 on 4 ")
    assert float(lines["sql"].split()[6].rstrip("x")) == pytest.approx(2.0, rel=0.1)
    assert lines["chat"].startswith("chat t0.8 8 0 off: plain is 1.")
    assert "x faster" in lines["chat"]


def test_a_tree_is_shown_with_its_size_and_how_it_came_about(redraft: Run, database: Engine) -> None:
    shapes, worth = Shapes.of(4, 16), (1.7, 2.2, 1.4, 1.5)
    governor = Governor(shapes, GovernorConfig())
    gains = tuple((tree.depth, tree.nodes, gain) for tree, gain in zip(shapes.further, worth, strict=True))
    governed(Machine(lambda _, row_class: 0.6, longest=4, trees=gains), governor, [SQL], 600)
    with serving(database, governor) as address:
        result = redraft("governor", "--url", address)
        (decision,) = json.loads(redraft("governor", "--url", address, "--json").stdout)["decisions"]
    assert "4, grown tree of" in " ".join(result.stdout.split())
    assert (decision["nodes"] > 4, decision["fixed"], decision["lookup"]) == (True, False, False)


def test_a_tree_of_matches_and_of_the_drafters_own_says_that_it_holds_both(redraft: Run, database: Engine) -> None:
    shapes = Shapes.of(4, 0, ngram_first=True)
    governor, rows = Governor(shapes, GovernorConfig()), [replace(SQL, match="short")]
    governed(Machine(lambda _, row_class: 0.6, longest=4, lookups=shapes.lookups, matched=0.55), governor, rows, 600)
    with serving(database, governor) as address:
        result = redraft("governor", "--url", address)
        (decision,) = json.loads(redraft("governor", "--url", address, "--json").stdout)["decisions"]
    assert "n-grams and drafter" in " ".join(result.stdout.split())
    assert (decision["lookup"], decision["joined"]) == (True, True)


def test_json_holds_the_figures_as_the_server_gives_them(redraft: Run, database: Engine, governor: Governor) -> None:
    with serving(database, governor) as address:
        answer = json.loads(redraft("governor", "--url", address + "/", "--json").stdout)
    assert [d["draft_length"] for d in answer["decisions"]] == [0, 4]
    assert answer["decisions"][1]["plain_ms"] == pytest.approx(49.5, rel=0.2)


def test_a_server_without_a_governor_and_one_without_rounds_are_told_apart(redraft: Run, database: Engine) -> None:
    with serving(database, None) as address:
        assert "the governor is off" in redraft("governor", "--url", address).stdout
    with serving(database, Governor(Shapes(4), GovernorConfig())) as address:
        assert "no round was played yet" in redraft("governor", "--url", address).stdout


def test_a_server_that_is_not_there_is_named(redraft: Run) -> None:
    result = redraft("governor", "--url", "http://127.0.0.1:1")
    assert result.exit_code == 1
    assert "no server answers at http://127.0.0.1:1" in result.stderr
    assert redraft("governor", "--url", "127.0.0.1:8765").exit_code == 1


def test_another_servers_key_and_a_missing_one_are_told_apart(redraft: Run, database: Engine, home: Path) -> None:
    with serving(database, None) as address:
        (home / KEY_FILE).write_text("rdk_of_another_server")
        refused = redraft("governor", "--url", address)
        (home / KEY_FILE).unlink()
        missing = redraft("governor", "--url", address)
    assert "another server's" in refused.stderr
    assert "operator.key" in missing.stderr
    assert refused.exit_code == missing.exit_code == 1
