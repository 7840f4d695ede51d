"""HTTP to an engine that teaches: what it refuses for good is told apart from what it cannot do now; and its load."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from prometheus_client.parser import text_string_to_metric_families

RUNNING: Final = (
    "vllm:num_requests_running", "sglang:num_running_reqs", "llamacpp:requests_processing", "redraft_requests_running",
)  # fmt: skip
WAITING: Final = (
    "vllm:num_requests_waiting", "sglang:num_queue_reqs", "llamacpp:requests_deferred", "redraft_requests_waiting",
)  # fmt: skip
NO_PAGE: Final = (ValueError, IndexError)  # what prometheus_client raises for text of another form


class TeacherRefused(RuntimeError):
    """The engine cannot teach; the message says why and what to do."""


class EngineAway(RuntimeError):
    """The engine did not answer, or said that it cannot now: try again later."""


class RequestRefused(RuntimeError):
    """The engine refuses this request, now and always."""


def load_of(metrics: str) -> tuple[float, float]:
    """(requests running, requests waiting) in Prometheus' text, over all labels; 0 where it tells of none.

    Raises one of `NO_PAGE`.
    """
    samples = [sample for family in text_string_to_metric_families(metrics) for sample in family.samples]
    return (
        sum(sample.value for sample in samples if sample.name in RUNNING),
        sum(sample.value for sample in samples if sample.name in WAITING),
    )


@dataclass(frozen=True)
class Http:
    """Requests to the engine. What it refuses for good is told apart from what it cannot do now."""

    url: str
    key: str = ""
    timeout: float = 120.0

    def get(self, path: str) -> bytes:
        return self._send(Request(self._at(path)))

    def get_json(self, path: str) -> Any:
        return _json(self.get(path))

    def post_json(self, path: str, body: Mapping[str, Any]) -> Any:
        data = json.dumps(body).encode()
        return _json(self._send(Request(self._at(path), data, {"Content-Type": "application/json"})))

    def _at(self, path: str) -> str:
        if not self.url.startswith(("http://", "https://")):
            raise TeacherRefused(f"REDRAFT_TEACHER_URL={self.url}: it must begin with http:// or https://")
        return self.url.rstrip("/").removesuffix("/v1") + path

    def _send(self, request: Request) -> bytes:
        request.add_header("X-Redraft-Train", "no")  # what the trainer asks is nobody's traffic
        if self.key:
            request.add_header("Authorization", f"Bearer {self.key}")
        try:
            with urlopen(request, timeout=self.timeout) as reply:
                body: bytes = reply.read()
                return body
        except HTTPError as error:
            said = f"HTTP {error.code}: {error.read(500).decode(errors='replace')}"
            if error.code == 429 or error.code >= 500:
                raise EngineAway(said) from error
            raise RequestRefused(said) from error
        except (URLError, OSError) as error:
            raise EngineAway(str(error)) from error


def _json(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError as error:
        raise RequestRefused(f"an answer that is no JSON: {error}") from error
