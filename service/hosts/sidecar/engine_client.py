"""The sidecar's own questions to the engine: short ones, from threads of its own, never on a request's way."""

import json
from collections.abc import Callable
from typing import Any, Final

import httpx2

SECONDS: Final = 60.0
METRICS_SECONDS: Final = 5.0
AWAY: Final = (httpx2.HTTPError,)


class EngineClient:
    """`url` tells where the engine is now; `key` is sent where it is not empty."""

    def __init__(self, url: Callable[[], str], key: str = "") -> None:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._url = url
        none_kept = httpx2.Limits(max_keepalive_connections=0)  # as in upstream
        self._client = httpx2.Client(timeout=SECONDS, trust_env=False, headers=headers, limits=none_kept)

    def get(self, path: str, seconds: float = SECONDS) -> tuple[int, bytes]:
        """Status and body; raises one of `AWAY`."""
        answer = self._client.get(self._url() + path, timeout=seconds)
        return answer.status_code, answer.content

    def post(self, path: str, body: bytes) -> tuple[int, bytes]:
        """A JSON text, as it stands."""
        answer = self._client.post(self._url() + path, content=body, headers={"Content-Type": "application/json"})
        return answer.status_code, answer.content

    def told(self, path: str, body: Any = None) -> dict[str, Any]:
        """What a question is answered with; empty where there is no such path or no such answer."""
        status, data = self.get(path) if body is None else self.post(path, json.dumps(body).encode())
        try:
            found = json.loads(data) if status == 200 else {}
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}

    def close(self) -> None:
        self._client.close()
