"""The client's bytes through a sidecar are those that the engine gives without one: held against our own server."""

from typing import Any

import pytest

from tests.service.asking import CHAT, MODEL, PROMPT
from tests.service.hosts.sidecar.rig import Rig, told

FORMS = [
    pytest.param(path, stream, id=f"{path.rpartition('/')[2]}-{'stream' if stream else 'whole'}")
    for path in ("/v1/chat/completions", "/v1/completions")
    for stream in (False, True)
]
ASKED: list[dict[str, Any]] = [
    {},
    {"return_token_ids": True},
    {"return_token_ids": False, "return_metrics": False},
    {"return_metrics": True},
    {"logprobs": 2},
    {"logprobs": 2, "return_token_ids": True, "return_metrics": True},
    {"stop": "e"},
    {"usage": True},
    {"response_format": {"type": "json_object"}},
    {"temperature": 0.8, "seed": 3},
]


def _body(path: str, stream: bool, asked: dict[str, Any]) -> dict[str, Any]:
    fields = dict(asked)
    said: dict[str, Any] = {"messages": CHAT} if "chat" in path else {"prompt": PROMPT}
    if fields.pop("usage", False) and stream:
        fields["stream_options"] = {"include_usage": True}
    if "chat" in path and "logprobs" in fields:
        fields |= {"logprobs": True, "top_logprobs": fields["logprobs"]}
    return {
        "model": MODEL,
        **said,
        "max_tokens": 24,
        "temperature": 0,
        **fields,
        **({"stream": True} if stream else {}),
    }


@pytest.mark.parametrize("asked", ASKED, ids=str)
@pytest.mark.parametrize(("path", "stream"), FORMS)
def test_an_observed_answer_has_the_plain_one_s_bytes(
    openai_address: str, rig: Rig, path: str, stream: bool, asked: dict[str, Any]
) -> None:
    body = _body(path, stream, asked)
    direct = told(openai_address, path, body)
    assert direct[0] == 200
    before = len(rig.kept)
    assert told(rig.address, path, body) == direct
    _, seen = rig.read(before + 1)[-1]
    assert seen.prompt_ids
    assert seen.output
    assert seen.steps is not None
    assert "not_stripped" not in rig.observer.counts


def test_a_request_that_is_refused_gets_the_engine_s_own_words(openai_address: str, rig: Rig) -> None:
    body = _body("/v1/completions", False, {"temperature": 9})
    assert told(rig.address, "/v1/completions", body) == told(openai_address, "/v1/completions", body)
    assert not rig.asked_again
