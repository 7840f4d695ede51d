"""How tests ask OpenAI's API: by what name, what, and over which server."""

import json
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI

from adapter.target import Target
from adapter.typical import Typical
from service.engine.engine import Engine
from service.openai_api import Served, openai_router
from service.openai_errors import install
from tests.service.serving import call

MODEL = "tiny"
PROMPT = "the drafter proposes"
CHAT: list[Any] = [{"role": "user", "content": "Hello, world!"}]


def openai_app(target: Target, engine: Engine, typical: Typical | None = None) -> FastAPI:
    """OpenAI's routes alone."""
    app = FastAPI()
    install(app)
    app.include_router(openai_router(Served(target, engine, MODEL, typical)))
    return app


def completion(address: str, **fields: Any) -> tuple[int, dict[str, Any]]:
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 4, "temperature": 0, **fields}
    status, data = call(address, "POST", "/v1/completions", body)
    return status, json.loads(data)


def chat(address: str, headers: Mapping[str, str] | None = None, **fields: Any) -> tuple[int, dict[str, Any]]:
    body = {"model": MODEL, "messages": CHAT, "max_tokens": 4, "temperature": 0, **fields}
    status, data = call(address, "POST", "/v1/chat/completions", body, headers)
    return status, json.loads(data)


def events(address: str, path: str, **fields: Any) -> list[Any]:
    """The events of a stream, as they stand on the wire."""
    body = {"model": MODEL, "max_tokens": 12, "temperature": 0, "stream": True, **fields}
    status, data = call(address, "POST", path, body)
    assert status == 200
    parts = data.decode().split("\n\n")
    assert parts[-2:] == ["data: [DONE]", ""]
    assert all(part.startswith("data: ") for part in parts[:-1])
    return [json.loads(part.removeprefix("data: ")) for part in parts[:-2]]
