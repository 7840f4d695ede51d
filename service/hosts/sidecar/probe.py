"""Asks an engine at the start what it is and what it tells, and says what is missing and what to do.

Each form of request is sent twice, plainly and with the additions. From the two answers is learnt how the additions are
taken out again, and it is tried: unless that gives the plain answer's bytes (what was said and whose it is left aside),
requests of that form are not observed.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import structlog

from service.hosts.sidecar.asking import Asked, asking, read
from service.hosts.sidecar.config import SidecarConfig
from service.hosts.sidecar.dialects import DIALECTS, FORMS, Dialect, Engine, Form
from service.hosts.sidecar.engine_client import EngineClient
from service.hosts.sidecar.excision import Edit, NotPlain, becomes, each, edited, gone, with_member
from service.hosts.sidecar.findings import Findings, Plan
from service.hosts.sidecar.reading import Seen
from service.hosts.sidecar.reading import read as read_answer
from service.hosts.sidecar.stripping import Bare, Stripping, learn, payloads

TOKENS: Final = 12
PROMPT: Final = "Count from one to ten: one, two, three,"
OWNERS: Final[dict[str, Engine]] = {"vllm": "vllm", "sglang": "sglang", "llamacpp": "llamacpp", "redraft": "redraft"}

log = structlog.get_logger()


class NoEngine(RuntimeError):
    """Nothing answers there as an OpenAI-compatible server does."""


@dataclass
class _Probed:
    """One form, as far as it was found out."""

    plan: Plan | None = None
    problem: str = ""


def probe(client: EngineClient, config: SidecarConfig) -> Findings:
    """What the engine tells. Raises `NoEngine`, or one of `AWAY`."""
    owner, model, root = _model(client)
    dialect = DIALECTS[OWNERS.get(owner, "unknown")]
    if dialect.engine == "unknown":
        return Findings(dialect, owner, model, root, missing=(f"{model} is served by {owner!r}: {dialect.lacking}",))
    plans, missing = {}, [dialect.lacking] if dialect.lacking else []
    for form in FORMS:
        probed = _form(client, form, dialect, model, config.sidecar_top_k)
        if probed.plan is not None:
            plans[form] = probed.plan
        missing += [probed.problem] if probed.problem else []
    missing += _lacking(dialect, list(plans.values()), config)
    version = _version(client, dialect.engine)
    return Findings(dialect, version, model, root, plans, tuple(dict.fromkeys(missing)))


def _model(client: EngineClient) -> tuple[str, str, str]:
    """Who serves the first model that is no adapter of another, its name, and where it is from."""
    for entry in client.told("/v1/models").get("data") or []:
        if isinstance(entry, dict) and not entry.get("parent") and entry.get("id"):
            return str(entry.get("owned_by", "")), str(entry["id"]), str(entry.get("root") or "")
    raise NoEngine("GET /v1/models names no model: is this an OpenAI-compatible server?")


def _version(client: EngineClient, engine: Engine) -> str:
    if engine == "vllm":
        return str(client.told("/version").get("version", ""))
    if engine == "sglang":
        return str(client.told("/server_info").get("version", ""))
    if engine == "llamacpp":
        return str(client.told("/props").get("build_info", ""))
    return ""


def _form(client: EngineClient, form: Form, dialect: Dialect, model: str, top_k: int) -> _Probed:
    """Plainly, and with as many log-probabilities as the engine gives."""
    body = _question(form, model)
    asked = read(form.path, body, model)
    assert asked is not None, "a question of our own is plain"
    status, plain = client.post(form.path, body)
    if status != 200:
        return _Probed(problem=f"{form}: the engine answers {status}: such requests pass, and are not observed")
    for k in dict.fromkeys((top_k, min(top_k, 5), 0)):
        status, observed = client.post(form.path, asking(body, asked, dialect, k) or body)
        if status == 200:
            return _compared(asked, dialect, k, plain, observed, _with_usage(client, form, body))
    return _Probed(problem=f"{form}: the engine refuses {', '.join(dialect.asks(form, 0))} ({status})")


def _with_usage(client: EngineClient, form: Form, body: bytes) -> bytes:
    """The plain stream of a client that asks for its usage; nothing where the engine does not know that."""
    if not form.stream:
        return b""
    status, answer = client.post(form.path, with_member(body, "stream_options", b'{"include_usage":true}'))
    return answer if status == 200 else b""


def _question(form: Form, model: str) -> bytes:
    said: dict[str, Any] = {"messages": [{"role": "user", "content": PROMPT}]} if form.chat else {"prompt": PROMPT}
    streamed = {"stream": True} if form.stream else {}
    return json.dumps({"model": model, **said, "max_tokens": TOKENS, "temperature": 0, **streamed}).encode()


def _compared(asked: Asked, dialect: Dialect, top_k: int, plain: bytes, observed: bytes, usage: bytes) -> _Probed:
    form = asked.form
    there, here = (payloads(plain), payloads(observed)) if form.stream else ([plain], [observed])
    try:
        bare, seen = learn(form, there, here, payloads(usage)), read_answer(here)
        stripped = _stripped(asked, dialect, bare, here)
        wrong = _difference([_masked(text) for text in there], [_masked(text) for text in stripped])
    except (NotPlain, ValueError) as error:
        return _Probed(problem=f"{form}: the answer cannot be read ({error}): such requests are not observed")
    if wrong:
        return _Probed(problem=f"{form}: the additions cannot be taken out without a trace ({wrong}): not observed")
    return _told(form, dialect, bare, top_k, seen)


def _told(form: Form, dialect: Dialect, bare: Bare, top_k: int, seen: Seen) -> _Probed:
    """What a form's answer held of what was asked for."""
    rows = top_k if seen.rows and all(row is not None for row in seen.rows) else 0
    ids = seen.complete and bool(seen.prompt_ids or dialect.identities)
    steps = seen.steps is not None and bool(seen.steps.accepted)
    plan = Plan(bare, rows if dialect.top_k else top_k, ids, steps, seen.totals is not None and seen.totals.rounds > 0)
    if not ids:
        return _Probed(problem=f"{form}: the engine does not name all tokens: such requests pass, and are not observed")
    return _Probed(plan)


def _stripped(asked: Asked, dialect: Dialect, bare: Bare, observed: Sequence[bytes]) -> list[bytes]:
    stripping = Stripping(asked.wants, bare, dialect)
    if not asked.form.stream:
        return [stripping.text(text) for text in observed]
    return [text for text in map(stripping.chunk, observed) if text is not None]


_ANY: Final = becomes(b"0")
_SAID: Final[dict[str, Edit]] = {"content": _ANY, "text": _ANY}


def _masked(text: bytes) -> bytes:
    """An answer without what differs from one to the next: who, when, how fast, and what was said."""
    choice: dict[str, Edit] = {
        "message": lambda value: edited(value, _SAID),
        "delta": lambda value: edited(value, _SAID),
        "finish_reason": lambda value: value if value == b"null" else b"0",
        "stop_reason": _ANY,
        "matched_stop": _ANY,
        **_SAID,
    }
    top: dict[str, Edit] = {"id": _ANY, "created": _ANY, "usage": gone, "metrics": gone, "timings": gone}
    return re.sub(rb"[\s,]+(?=[}\]])", b"", edited(text, {**top, "choices": each(choice)}))


def _difference(plain: Sequence[bytes], stripped: Sequence[bytes]) -> str:
    """Of the shapes that occur, in the order of their first one: how many chunks there are, batching decides."""
    there, here = list(dict.fromkeys(plain)), list(dict.fromkeys(stripped))
    if there == here:
        return ""
    for one, other in zip(there, here, strict=False):
        if one != other:
            at = next(
                (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
            )
            return f"{one[max(at - 10, 0) : at + 30]!r} became {other[max(at - 10, 0) : at + 30]!r}"
    return f"{len(there)} shapes of chunks became {len(here)}"


def _lacking(dialect: Dialect, plans: Sequence[Plan], config: SidecarConfig) -> list[str]:
    """What is missing in every form, and its cure."""
    if not plans:
        return ["no request is observed: drafters get no feedback from here"]
    found = []
    if dialect.engine == "vllm" and not any(plan.steps for plan in plans):
        found.append(
            "no counts of each step: start vLLM with --per-request-spec-decode-metrics detailed and with a "
            "--speculative-config; until then acceptance comes from its /metrics alone"
        )
    if dialect.top_k and config.sidecar_top_k and not any(plan.top_k for plan in plans):
        found.append(
            "no target probabilities: start vLLM with --max-logprobs 20 or more, or set REDRAFT_TEACHER=rescored "
            "for the worker"
        )
    return found
