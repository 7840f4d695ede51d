"""How tests ask OpenAI's API: by what name, what, and over which server."""

import json
from typing import Any

from fastapi import FastAPI

from adapter.target import Target
from service.engine.engine import Engine
from service.openai_api import Served, openai_router
from service.openai_errors import install
from tests.service.serving import call

MODEL = "tiny"
PROMPT = "the drafter proposes"
CHAT: list[Any] = [{"role": "user", "content": "Hello, world!"}]


def openai_app(target: Target, engine: Engine) -> FastAPI:
    """OpenAI's routes alone."""
    app = FastAPI()
    install(app)
    app.include_router(openai_router(Served(target, engine, MODEL)))
    return app


def completion(address: str, **fields: Any) -> tuple[int, dict[str, Any]]:
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 4, "temperature": 0, **fields}
    status, data = call(address, "POST", "/v1/completions", body)
    return status, json.loads(data)
