"""`redraft route`: the list says who proposes for what and why; what is set by hand is kept as the operator's."""

import json

import pytest
from sqlalchemy import Engine

from storage.registry import Registry
from storage.routes import LEARNED, Routes
from storage.standings import Score, Standing, Standings
from storage.weights import WeightsStore
from storage.windows import Windows
from tests.cli.conftest import Run
from tests.storage.rows import make_drafter, make_record

TARGET = "target-1"


@pytest.fixture
def routes(registry: Registry) -> Routes:
    make_drafter(registry)
    make_drafter(registry, "sql")
    return Routes(registry.engine)


@pytest.fixture
def scored(routes: Routes, database: Engine, store: WeightsStore) -> Routes:
    window = Windows(database, store).keep("chat", (make_record("a"),), ())
    assert window is not None
    standings = {
        "chat": Standing(4, 0.0625, {"greedy": Score(200.0, 0.41, 0.01)}, 230),
        "sql": Standing(2, 0.9375, {"greedy": Score(200.0, 0.72, 0.01)}, 230),
    }
    Standings(database).revise(
        TARGET, window.id, lambda known: {"spider": standings, "other": {"chat": standings["chat"]}}
    )
    return routes


def test_without_routes_it_says_who_proposes_for_all(redraft: Run, registry: Registry) -> None:
    make_drafter(registry)
    shown = redraft("route").stdout
    assert "no workload is routed: chat proposes for all of them" in shown
    assert "REDRAFT_ROUTING=label" in shown
    assert json.loads(redraft("route", "--json").stdout) == []


def test_a_route_is_set_and_listed_with_who_and_why(redraft: Run, routes: Routes) -> None:
    done = redraft("route", "spider", "sql", "--reason", "it knows SQL")
    assert "sql proposes for workload spider from now on" in done.stdout
    (line,) = json.loads(redraft("route", "--json").stdout)
    assert (line["workload"], line["drafter"], line["cause"], line["reason"]) == (
        "spider", "sql", "manual", "it knows SQL",
    )  # fmt: skip
    assert line["actor"].startswith("cli:")
    assert line["since"]
    shown = " ".join(redraft("route").stdout.split())
    assert "spider sql manual (cli:" in shown
    assert "it knows SQL" in shown


def test_setting_prints_json_too(redraft: Run, routes: Routes) -> None:
    line = json.loads(redraft("route", "spider", "sql", "--json").stdout)
    assert (line["workload"], line["drafter"], line["drafters"]) == ("spider", "sql", [])


def test_a_workload_can_be_held_on_the_general_drafter_and_given_back_to_the_trainer(
    redraft: Run, routes: Routes
) -> None:
    redraft("route", "spider", "sql")
    assert "chat proposes" in redraft("route", "spider", "--general").stdout
    (held,) = json.loads(redraft("route", "--json").stdout)
    assert (held["drafter"], held["cause"]) == ("chat", "manual")
    assert "chat proposes" in redraft("route", "spider", "--auto", "--drafter", "chat").stdout
    assert json.loads(redraft("route", "--json", "--drafter", "chat").stdout) == []


def test_the_general_drafter_by_name_is_the_general_drafter(
    redraft: Run, routes: Routes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REDRAFT_DRAFTER", "chat")
    redraft("route", "spider", "chat")
    assert routes.of(TARGET)[0].drafter == ""


def test_the_list_has_each_drafters_weight_and_acceptance_probability(redraft: Run, scored: Routes) -> None:
    scored.put(TARGET, "spider", "sql", LEARNED, "routing", "weight 0.938 against 0.062 of chat")
    other, spider = json.loads(redraft("route", "--json").stdout)
    assert (other["workload"], other["drafter"], other["cause"], other["since"]) == ("other", "chat", "general", None)
    assert (spider["drafter"], spider["cause"], spider["actor"]) == ("sql", "learned", "routing")
    heaviest = spider["drafters"][0]
    assert (heaviest["drafter"], heaviest["version"], heaviest["weight"], heaviest["requests"]) == (
        "sql",
        2,
        0.9375,
        230,
    )
    assert heaviest["acceptance_probability"]["greedy"]["mean"] == 0.72
    shown = " ".join(redraft("route").stdout.split())
    assert "sql v2 0.720 (greedy), chat v4 0.410 (greedy)" in shown
    assert "sql 0.938, chat 0.062" in shown or "sql 0.938, chat 0.063" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("spider",), "one of DRAFTER, --general and --auto"),
        (("--general",), "one of DRAFTER"),
        (("spider", "sql", "--general"), "one of DRAFTER"),
        (("spider", "nobody"), "no drafter is called 'nobody'"),
    ],
)
def test_what_makes_no_sense_is_refused(redraft: Run, routes: Routes, arguments: tuple[str, ...], message: str) -> None:
    done = redraft("route", *arguments)
    assert done.exit_code == 1
    assert message in done.stderr
    assert routes.of(TARGET) == []


def test_where_routing_is_off_it_says_that_nobody_follows(
    redraft: Run, routes: Routes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REDRAFT_ROUTING", "off")
    assert "servers do not follow routes" in redraft("route", "spider", "sql").stderr
