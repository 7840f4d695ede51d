"""Taking the additions out of answers whose shapes were read in the engines' sources and not recorded."""

import json
from typing import Any

from service.hosts.sidecar.asking import Wants
from service.hosts.sidecar.dialects import CHAT, DIALECTS, Form
from service.hosts.sidecar.stripping import Bare, Stream, Stripping, learn, payloads

STREAM = Form(CHAT, True)
NOTHING = Wants(token_ids=False, logprobs=False, usage=False, metrics=False)


def _events(*chunks: dict[str, Any]) -> bytes:
    lines = [f"data: {json.dumps(chunk, separators=(',', ':'))}\n\n" for chunk in chunks]
    return "".join([*lines, "data: [DONE]\n\n"]).encode()


def _chunk(delta: dict[str, Any], finish: str | None = None, **extra: Any) -> dict[str, Any]:
    return {"id": "x", "choices": [{"index": 0, "delta": delta, "finish_reason": finish, **extra}]}


def test_sglang_s_chunk_of_its_own_is_left_out() -> None:
    said = [_chunk({"role": "assistant", "content": ""}), _chunk({"content": "a"}), _chunk({}, "stop")]
    extension = {"input_ids": [1], "output_ids": [[2]], "spec_tokens_details": {"spec_verify_ct": 1}}
    plain, observed = _events(*said), _events(*said, {"id": "x", "choices": [], "sglext": extension})
    bare = learn(STREAM, payloads(plain), payloads(observed))
    assert bare.top == {"sglext": "removed"}
    assert Stream(Stripping(NOTHING, bare, DIALECTS["sglang"]), 10**6).feed(observed) == plain


def test_sglang_s_extension_that_a_plain_answer_has_too_stays() -> None:
    said = {"id": "x", "choices": [], "sglext": {"routed_experts": "r"}}
    bare = learn(Form(CHAT, False), [json.dumps(said).encode()], [json.dumps(said).encode()])
    assert bare == Bare()


def test_a_chunk_that_vllm_s_parser_would_have_kept_back_is_left_out() -> None:
    """With a parser for reasoning or tools, vLLM sends a chunk without a delta for the sake of its token ids."""
    bare = Bare(choice={"token_ids": "null"})
    kept = [_chunk({"content": "a"}, token_ids=None), _chunk({}, "stop", token_ids=None)]
    observed = _events(
        _chunk({"content": "a"}, token_ids=[1]), _chunk({}, token_ids=[2]), _chunk({}, "stop", token_ids=[3])
    )
    assert Stream(Stripping(NOTHING, bare, DIALECTS["vllm"]), 10**6).feed(observed) == _events(*kept)
    wanted = Wants(token_ids=True, logprobs=False, usage=False, metrics=False)
    assert Stream(Stripping(wanted, bare, DIALECTS["vllm"]), 10**6).feed(observed) == observed


def test_an_empty_text_that_vllm_sends_anyway_stays() -> None:
    observed = _events(_chunk({"content": ""}, token_ids=[1]))
    found = Stream(Stripping(NOTHING, Bare(choice={"token_ids": "null"}), DIALECTS["vllm"]), 10**6).feed(observed)
    assert found == _events(_chunk({"content": ""}, token_ids=None))


def test_an_event_without_an_end_is_passed_on_and_more_than_a_bound_is_not_kept() -> None:
    stream = Stream(Stripping(NOTHING, Bare(), DIALECTS["vllm"]), limit=100)
    event = _events(_chunk({"content": "a" * 90}))
    assert stream.feed(event) == event
    assert not stream.whole
    endless = b"data: " + b"x" * (4 * 1024 * 1024)
    assert stream.feed(endless) == endless
    assert stream.feed(b"data: half") == b""
    assert stream.rest() == b"data: half"


def test_events_of_other_kinds_pass_as_they_are() -> None:
    stream = Stream(Stripping(NOTHING, Bare(choice={"token_ids": "null"}), DIALECTS["vllm"]), 10**6)
    for event in (b": ping\n\n", b"event: x\ndata: {}\n\n", b"data: [1]\r\n\r\n", b"id: 1\n\n", b"data: [DONE]\n\n"):
        assert stream.feed(event) == event


def test_what_stands_beside_a_usage_that_the_client_asked_for_stays() -> None:
    """vLLM's counts of rounds: on that chunk alone, whoever asks for it."""
    said = b'{"choices":[{"index":0,"delta":{"content":"a"},"finish_reason":"stop"}]}'
    usage = b'{"choices":[],"usage":{"total_tokens":3},"metrics":{"speculative_decoding":{}}}'
    bare = learn(STREAM, [said], [said, usage], [said, usage])
    wanting = Wants(token_ids=False, logprobs=False, usage=True, metrics=False)
    assert Stripping(wanting, bare, DIALECTS["vllm"]).chunk(usage) == usage
    assert Stripping(NOTHING, bare, DIALECTS["vllm"]).chunk(usage) is None
    unlike = learn(STREAM, [said], [said, usage])
    assert b"metrics" not in (Stripping(wanting, unlike, DIALECTS["vllm"]).chunk(usage) or b"")
