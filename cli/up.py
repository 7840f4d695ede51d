"""`redraft up`: everything on this machine in one command, on the embedded defaults, until Ctrl-C."""

import json
import os
import signal
import time
from typing import Annotated, Any

import typer

from cli import logs
from cli.nearby import ask_nearby
from cli.output import CommandError, say
from cli.settings import settings
from storage.config import StorageConfig

TICK_SECONDS = 0.5


def up(
    layers: Annotated[int, typer.Option(help="layers of a first drafter, if there is none yet", min=1)] = 2,
    warm_up: Annotated[bool, typer.Option(help="warm a first drafter up on the target's own answers")] = False,
) -> None:
    """Start all parts here: Valkey, migrations, a first drafter, serving, trainer, housekeeper and beat."""
    logs.configure()
    from cli.supervisor import Stack

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _leave)
    init = ["--layers", str(layers), "--warm-up" if warm_up else "--no-warm-up"]
    try:
        with Stack(settings(StorageConfig), os.environ, say, init) as stack:
            _say_ready(stack.url, str(stack.logs))
            while stack.serving:
                time.sleep(TICK_SECONDS)
    except Leaving:
        say("stopped; all state is kept: `redraft up` goes on with it")
        return
    raise CommandError("serving ended and could not be restarted: read its log, or run `redraft doctor`")


class Leaving(BaseException):
    """Ctrl-C or SIGTERM; no `except Exception` on the way may hold it up."""


def _leave(*_: Any) -> None:
    """Once: while the parts are being stopped, further signals change nothing."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    raise Leaving


def _say_ready(url: str, folder: str) -> None:
    model = _model(url)
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "Why is the sky blue?"}]})
    say(f"redraft is ready: {url}/v1 (model {model}); logs are in {folder}; Ctrl-C stops all")
    say(f"  curl {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'")


def _model(url: str) -> str:
    """The name under which the target is served."""
    with ask_nearby(f"{url}/v1/models", timeout=10) as reply:
        return str(json.load(reply)["data"][0]["id"])
