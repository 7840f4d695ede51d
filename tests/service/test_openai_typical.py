"""Typical acceptance over HTTP: refused unless the server allows it, and named in every answer that it touched."""

import json
import urllib.request
from collections.abc import Iterator

import pytest

from adapter.target import Target
from adapter.typical import Typical
from service.engine.engine import Engine
from tests.service.asking import CHAT, MODEL, PROMPT, chat, events, openai_app
from tests.service.engine.oracle import first_layers
from tests.service.engine.oracle import running as running_engine
from tests.service.serving import call, running

ASKED = {"X-Redraft-Acceptance": "typical"}
SAID = {"rule": "typical", "lossless": False, "epsilon": 0.09, "delta": 0.3}


@pytest.fixture(scope="module")
def engine(target: Target) -> Iterator[Engine]:
    with running_engine(target, first_layers(target, layers=2)) as engine:
        yield engine


@pytest.fixture(scope="module")
def exact(target: Target, engine: Engine) -> Iterator[str]:
    with running(openai_app(target, engine)) as address:
        yield address


@pytest.fixture(scope="module")
def lossy(target: Target, engine: Engine) -> Iterator[str]:
    with running(openai_app(target, engine, Typical())) as address:
        yield address


def test_a_server_that_was_not_told_to_allow_it_refuses_and_says_which_setting_it_is(exact: str) -> None:
    status, answer = chat(exact, ASKED, temperature=0.8)
    assert status == 400
    assert "lossy" in answer["error"]["message"]
    assert "REDRAFT_TYPICAL_ACCEPTANCE" in answer["error"]["message"]
    assert answer["error"]["param"] == "x-redraft-acceptance"


def test_an_answer_says_that_it_is_lossy(lossy: str) -> None:
    status, answer = chat(lossy, ASKED, temperature=0.8, return_metrics=True)
    assert status == 200
    assert answer["acceptance"] == SAID
    assert answer["metrics"]["speculative_decoding"]["acceptance"] == SAID


def test_so_do_its_headers_and_every_chunk_of_a_stream(lossy: str) -> None:
    for path, what in (("/v1/completions", {"prompt": PROMPT}), ("/v1/chat/completions", {"messages": CHAT})):
        for stream in (False, True):
            body = {"model": MODEL, "max_tokens": 8, "temperature": 0.8, "stream": stream, **what}
            headers = {**ASKED, "Content-Type": "application/json"}
            request = urllib.request.Request(lossy + path, json.dumps(body).encode(), headers)
            with urllib.request.urlopen(request) as response:
                assert response.headers["X-Redraft-Acceptance"] == "typical, lossy"
                said = response.read().decode()
            parts = said.split("\n\n")[:-2] if stream else [said]
            assert parts
            assert all(json.loads(part.removeprefix("data: "))["acceptance"] == SAID for part in parts)


def test_others_on_the_same_server_hear_nothing_of_it(lossy: str, exact: str) -> None:
    """An answer on a server that allows it has the same fields as on one that does not, and the same text."""
    found = []
    for address in (lossy, exact):
        for headers in (None, {"X-Redraft-Acceptance": "exact"}):
            status, answer = chat(address, headers, return_metrics=True)
            assert status == 200
            assert "acceptance" not in answer
            assert "acceptance" not in answer["metrics"]["speculative_decoding"]
            found.append((answer.keys(), answer["choices"]))
        assert all("acceptance" not in e for e in events(address, "/v1/completions", prompt=PROMPT))
    assert found == [found[0]] * 4


def test_a_seed_with_it_is_a_contradiction(lossy: str) -> None:
    status, answer = chat(lossy, ASKED, temperature=0.8, seed=3)
    assert status == 400
    assert "depends on no drafter" in answer["error"]["message"]
    assert chat(lossy, None, temperature=0.8, seed=3)[0] == 200


def test_another_word_for_it_is_refused(lossy: str) -> None:
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 2}
    status, _ = call(lossy, "POST", "/v1/completions", body, {"X-Redraft-Acceptance": "medusa"})
    assert status == 400
