"""The reverse proxy before an engine that says just what a test wants."""

import http.client
import json
import socket
import time
from collections.abc import Callable
from typing import Any

import pytest

from service.hosts.sidecar.dialects import COMPLETIONS, DIALECTS, Form
from service.hosts.sidecar.findings import Findings, Plan
from service.hosts.sidecar.paths import passes
from service.hosts.sidecar.stripping import Bare
from tests.service.hosts.sidecar.rig import Script, beside, served
from tests.service.serving import call
from tests.waiting import until

PLAN = Plan(Bare(top={}, choice={"token_ids": "null", "logprobs": "null"}), 5, True, True, True)
FOUND = Findings(DIALECTS["vllm"], "0.32.0", "m", plans={Form(COMPLETIONS, False): PLAN, Form(COMPLETIONS, True): PLAN})
QUESTION = {"model": "m", "prompt": "hi"}
EVENT = b'data: {"id":"x","choices":[{"index":0,"text":"%d","token_ids":[%d]}]}\n\n'
STREAM = [(b"content-type", b"text/event-stream; charset=utf-8")]


def _raw(address: str, data: bytes) -> socket.socket:
    """A connection on which just these bytes were sent."""
    host, port = address.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=20)
    connection.sendall(data)
    return connection


def _asked(body: dict[str, Any], **headers: str) -> bytes:
    data = json.dumps(body).encode()
    lines = [f"POST {COMPLETIONS} HTTP/1.1", "Host: x", f"Content-Length: {len(data)}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + data


@pytest.mark.parametrize("target", ["/", "/anything/else?a=1&b=%2F+", "/v1/files/a%2Fb", "/x//y/../z", "/metrics"])
@pytest.mark.parametrize("method", ["GET", "DELETE", "PUT", "OPTIONS"])
def test_every_path_and_method_passes_as_it_is_written(method: str, target: str) -> None:
    engine = Script(status=207, pieces=[b"a", b"", b"b"], headers=[(b"content-type", b"text/x"), (b"x-one", b"1")])
    with served(engine) as address, beside(address, share=0.0) as rig:
        body = b"sent" if method == "PUT" else None
        status, answer = call(rig.address, method, target, body)
    assert (status, answer) == (207, b"ab")
    assert engine.asked[0]["method"] == method
    assert engine.asked[0]["target"] == target.encode()
    assert engine.asked[0]["body"] == (body or b"")


def test_headers_of_one_connection_stay_on_it_and_all_others_pass() -> None:
    answered = [(b"set-cookie", b"a=1"), (b"set-cookie", b"b=2"), (b"keep-alive", b"timeout=9"), (b"date", b"then")]
    engine = Script(headers=answered)
    sent = b"GET /v1/models HTTP/1.1\r\nHost: client.example\r\nConnection: X-Once, keep-alive\r\nX-Once: 1\r\n"
    sent += b"X-Kept: yes\r\nAuthorization: Bearer s\r\nTE: trailers\r\nX-Forwarded-For: 10.0.0.9\r\n\r\n"
    with served(engine) as address, beside(address, share=0.0) as rig:
        with _raw(rig.address, sent) as connection:
            answer = http.client.HTTPResponse(connection)
            answer.begin()
            answer.read()
        host = address.removeprefix("http://").encode()
    headers = engine.asked[0]["headers"]
    names = [name for name, _ in headers]
    assert dict(headers) == {
        b"host": host,
        b"x-kept": b"yes",
        b"authorization": b"Bearer s",
        b"x-forwarded-for": b"10.0.0.9, 127.0.0.1",
        b"via": b"1.1 redraft",
    }
    assert len(names) == len(set(names))
    assert answer.headers.get_all("set-cookie") == ["a=1", "b=2"]
    assert answer.headers["date"] == "then"
    assert answer.headers["keep-alive"] is None


def test_a_head_request_and_an_empty_answer_pass() -> None:
    engine = Script(status=204, pieces=[], headers=[(b"x-one", b"1")])
    with served(engine) as address, beside(address, share=0.0) as rig:
        assert call(rig.address, "HEAD", "/health") == (204, b"")


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_each_piece_of_a_stream_arrives_before_the_next_one_is_there(share: float) -> None:
    engine = Script(headers=STREAM, pieces=[EVENT % (i, i) for i in range(3)], pause=1.0)
    asked = _asked({**QUESTION, "stream": True})
    with served(engine) as address, beside(address, share, FOUND) as rig, _raw(rig.address, asked) as connection:
        answer = http.client.HTTPResponse(connection)
        answer.begin()
        first = answer.read1()
        assert engine.begun == 1
        rest = answer.read()
    expected = [EVENT % (i, i) for i in range(3)]
    if share:
        expected = [event.replace(b"[%d]" % i, b"null") for i, event in enumerate(expected)]
    assert first + rest == b"".join(expected)


def test_an_event_that_comes_in_two_pieces_is_stripped_when_it_is_whole() -> None:
    event = EVENT % (1, 1)
    engine = Script(
        headers=STREAM, pieces=[event[:40], event[40:] + event[:10], event[10:], b": ping\n\n", b"data: [DONE]\n\n"]
    )
    with served(engine) as address, beside(address, 1.0, FOUND) as rig:
        _, answer = call(rig.address, "POST", COMPLETIONS, {**QUESTION, "stream": True})
    assert answer == 2 * event.replace(b"[1]", b"null") + b": ping\n\ndata: [DONE]\n\n"


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_a_client_that_leaves_ends_its_request_at_the_engine(share: float) -> None:
    engine = Script(headers=STREAM, pieces=[EVENT % (1, 1)] * 200, pause=0.05)
    with served(engine) as address, beside(address, share, FOUND) as rig:
        with _raw(rig.address, _asked({**QUESTION, "stream": True})) as connection:
            connection.recv(10)
        until(lambda: engine.left == 1)
        until(lambda: rig.upstream.busy(address) == 0)
    assert engine.sent < 200


def test_a_client_that_waits_for_a_whole_answer_and_leaves_ends_it_too() -> None:
    engine = Script(pieces=[b" ", *[b" "] * 200, b"{}"], pause=0.05)
    with served(engine) as address, beside(address, 1.0, FOUND) as rig:
        with _raw(rig.address, _asked(QUESTION)):
            until(lambda: engine.sent > 0)
        until(lambda: engine.left == 1)


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_an_engine_that_dies_midway_breaks_the_client_off(share: float) -> None:
    engine = Script(headers=STREAM, pieces=[EVENT % (1, 1)] * 3, dies_after=2)
    with served(engine) as address, beside(address, share, FOUND) as rig:
        with _raw(rig.address, _asked({**QUESTION, "stream": True})) as connection:
            answer = http.client.HTTPResponse(connection)
            answer.begin()
            with pytest.raises(http.client.IncompleteRead) as broken:
                answer.read()
        engine.dies_after = None
        assert call(rig.address, "GET", "/x")[0] == 200
    stripped = EVENT.replace(b"[%d]", b"null") % 1 if share else EVENT % (1, 1)
    assert broken.value.partial.count(stripped) == 2
    assert not rig.kept


def test_an_engine_that_is_away_is_said_so_in_openai_s_form() -> None:
    with served(Script()) as address:
        pass
    with beside(address, 1.0, FOUND) as rig:
        status, answer = call(rig.address, "POST", COMPLETIONS, QUESTION)
    assert status == 502
    assert "cannot be reached" in json.loads(answer)["error"]["message"]


def stands_still(count: Callable[[], int]) -> bool:
    before = count()
    time.sleep(0.5)
    return count() == before


def test_a_client_that_does_not_read_holds_the_engine_up() -> None:
    engine = Script(headers=STREAM, pieces=[b"x" * 65_536] * 2_000)
    with served(engine) as address, beside(address, share=0.0) as rig:
        with _raw(rig.address, _asked({**QUESTION, "stream": True})) as connection:
            connection.recv(10)
            until(lambda: stands_still(lambda: engine.sent))
            assert engine.sent < 1_000
        until(lambda: rig.upstream.busy(address) == 0)


def test_a_body_that_is_not_known_beforehand_passes_in_pieces() -> None:
    engine = Script()
    sent = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    with served(engine) as address, beside(address, 1.0, FOUND) as rig, _raw(rig.address, sent) as connection:
        for piece in (b"ab", b"cd"):
            connection.sendall(b"%x\r\n%s\r\n" % (len(piece), piece))
        connection.sendall(b"0\r\n\r\n")
        http.client.HTTPResponse(connection).begin()
    assert engine.asked[0]["body"] == b"abcd"


def test_additions_that_the_engine_does_not_take_are_left_out_and_the_request_passes() -> None:
    engine = Script(refuses="return_token_ids", pieces=[b'{"choices":[]}'])
    with served(engine) as address, beside(address, 1.0, FOUND) as rig:
        for _ in range(3):
            assert call(rig.address, "POST", COMPLETIONS, QUESTION) == (200, b'{"choices":[]}')
        until(lambda: rig.asked_again == [True])
        assert rig.observer.counts == {"observed": 3, "refused": 3}
    assert engine.asked[-1]["body"] == json.dumps(QUESTION).encode()


@pytest.mark.parametrize(
    "body",
    [
        b"not json", b"[]", json.dumps({**QUESTION, "n": 2}).encode(), json.dumps({**QUESTION, "echo": True}).encode(),
        json.dumps({"model": "a-lora", "prompt": "hi"}).encode(),
        json.dumps({"model": "m", "prompt": ["a", "b"]}).encode(),
        b'{"model":"m","prompt":"hi","prompt":"twice"}',
        json.dumps({**QUESTION, "stream": True, "stream_options": {"continuous_usage_stats": True}}).encode(),
    ],
)  # fmt: skip
def test_what_cannot_be_observed_passes_as_it_came(body: bytes) -> None:
    engine = Script(pieces=[b'{"token_ids":[1]}'])
    with served(engine) as address, beside(address, 1.0, FOUND) as rig:
        assert call(rig.address, "POST", COMPLETIONS, body) == (200, b'{"token_ids":[1]}')
        assert rig.observer.counts == {"not_plain": 1}
    assert engine.asked[0]["body"] == body


@pytest.mark.parametrize(
    "headers",
    [
        {"X-Redraft-Workload": "no spaces here"},
        {"X-Redraft-Tenant": "x" * 65},
        {"X-Redraft-Train": "perhaps"},
        {"Content-Encoding": "gzip"},
    ],
)
def test_a_request_whose_headers_cannot_be_read_is_not_observed(headers: dict[str, str]) -> None:
    engine = Script()
    with served(engine) as address, beside(address, 1.0, FOUND) as rig:
        assert call(rig.address, "POST", COMPLETIONS, QUESTION, headers)[0] == 200
        assert rig.observer.counts == {}


def test_an_answer_in_another_coding_passes_untouched() -> None:
    engine = Script(
        headers=[(b"content-type", b"application/json"), (b"content-encoding", b"br")], pieces=[b"\x8b\x01"]
    )
    with served(engine) as address, beside(address, 1.0, FOUND) as rig:
        assert call(rig.address, "POST", COMPLETIONS, QUESTION) == (200, b"\x8b\x01")
    assert dict(engine.asked[0]["headers"])[b"accept-encoding"] == b"identity"


@pytest.mark.parametrize("answer", [b"no json", b'{"error":{}}', b'{"choices":[1]}'])
def test_an_answer_that_cannot_be_read_reaches_its_client(answer: bytes) -> None:
    with served(Script(pieces=[answer])) as address, beside(address, 1.0, FOUND) as rig:
        assert call(rig.address, "POST", COMPLETIONS, QUESTION) == (200, answer)
        until(lambda: rig.observer.counts.get("unreadable") == 1)


def test_an_answer_that_cannot_be_stripped_passes_as_it_came() -> None:
    answer = b'{"choices":[{"token_ids":[1],"token_ids":[2]}]}'
    with served(Script(pieces=[answer])) as address, beside(address, 1.0, FOUND) as rig:
        assert call(rig.address, "POST", COMPLETIONS, QUESTION) == (200, answer)
        until(lambda: rig.observer.counts.get("not_stripped") == 1)


def test_a_fault_of_the_observer_fails_nobody() -> None:
    def keep(*_: Any) -> None:
        raise RuntimeError("a fault")

    engine = Script(pieces=[b'{"choices":[]}'])
    with served(engine) as address, beside(address, 1.0, FOUND, keep=keep) as rig:
        for _ in range(2):
            assert call(rig.address, "POST", COMPLETIONS, QUESTION)[0] == 200
        until(lambda: rig.observer.counts.get("unreadable") == 2)


@pytest.mark.parametrize("path", ["/collective_rpc", "//pause", "/v1/../update_weights", "/reset_prefix_cache/"])
def test_a_path_that_steers_the_engine_is_passed_to_nobody(path: str) -> None:
    engine = Script()

    def may_pass(asked: str) -> bool:
        return passes(asked, DIALECTS["vllm"], steered=True, reachable=False)

    with served(engine) as address, beside(address, 1.0, FOUND, passes=may_pass) as rig:
        assert call(rig.address, "POST", path, {})[0] == 403
        assert call(rig.address, "GET", "/v1/models")[0] == 200
    assert len(engine.asked) == 1


def test_new_requests_go_to_the_engine_that_took_over_and_running_ones_stay() -> None:
    old, new = Script(headers=STREAM, pieces=[EVENT % (1, 1)] * 3, pause=0.3), Script(pieces=[b'{"choices":[]}'])
    with served(old) as blue, served(new) as green, beside(blue, 0.0) as rig:
        with _raw(rig.address, _asked({**QUESTION, "stream": True})) as connection:
            answer = http.client.HTTPResponse(connection)
            answer.begin()
            answer.read1()
            rig.upstream.flip(f"{green}/v1/")
            assert call(rig.address, "POST", COMPLETIONS, QUESTION) == (200, b'{"choices":[]}')
            until(lambda: rig.upstream.busy(green) == 0)
            assert rig.upstream.busy(blue) == 1
            assert answer.read() == EVENT % (1, 1) * 2
        until(lambda: rig.upstream.busy(blue) == 0)
