"""What tests of the HTTP side need: an application on a real loopback socket, by uvicorn in a thread."""

import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import uvicorn

from adapter.target import Target
from tests.waiting import until


@contextmanager
def running(app: Callable[..., Any], **of_uvicorn: Any) -> Iterator[str]:
    """Serve an ASGI application on a free port; gives its address, such as `http://127.0.0.1:40123`."""
    listener = socket.create_server(("127.0.0.1", 0))
    config = {"log_level": "warning", "timeout_graceful_shutdown": 5, **of_uvicorn}
    server = uvicorn.Server(uvicorn.Config(app, **config))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        until(lambda: server.started)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(timeout=20)
        listener.close()


@contextmanager
def slowed(target: Target, seconds: float = 0.02) -> Iterator[None]:
    """Each forward pass takes at least so long: a long answer is not over before what is done meanwhile."""
    hook = target.model.register_forward_pre_hook(lambda *_: time.sleep(seconds))
    try:
        yield
    finally:
        hook.remove()


def call(
    address: str, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
) -> tuple[int, bytes]:
    """A request as it stands, without a client that would mend it; a body that is not bytes is sent as JSON."""
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    given = {} if data is None else {"Content-Type": "application/json"}
    connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=60)
    try:
        connection.request(method, path, data, {**given, **(headers or {})})
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()
