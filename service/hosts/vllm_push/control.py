"""vLLM's control routes over HTTP (development mode), on loopback only: they carry no authentication."""

import socket
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import httpx2

from service.hosts.loopback import EngineTrouble, NotLoopback, is_loopback, loopback


class EngineAway(EngineTrouble):
    """The engine gave no answer."""


@dataclass(frozen=True)
class Described:
    """What the worker says of itself."""

    engine: str  # another after each start
    vllm: str
    method: str | None
    draft: str | None  # the checkpoint that it started with
    workers: int
    speculating: bool


class Control:
    """One engine. Every call raises `EngineTrouble` where it fails; it may then have been carried out all the same."""

    def __init__(self, url: str, seconds: float) -> None:
        host, self.port = loopback(url)
        self.url = f"http://{host}:{self.port}"
        # vLLM ends a connection on which a call failed: none is used twice, so that the next call does not fail for it.
        limits = httpx2.Limits(max_keepalive_connections=0)
        self._client = httpx2.Client(base_url=self.url, timeout=seconds, trust_env=False, limits=limits)

    def close(self) -> None:
        self._client.close()

    def check_private(self) -> None:
        """Raise `NotLoopback` where the routes answer on another address of this machine too."""
        for address in _own_addresses():
            try:
                answer = self._client.get(f"http://{address}:{self.port}/is_paused", timeout=2.0)
            except (httpx2.HTTPError, httpx2.InvalidURL):
                continue
            if "is_paused" in answer.text:
                raise NotLoopback(
                    f"anyone who reaches {address}:{self.port} can change this engine's weights: "
                    f"start vLLM with --host 127.0.0.1"
                )

    def describe(self) -> Described:
        """Raises `EngineTrouble` too where the engine was not started for pushes, and says how to."""
        try:
            said = self._worker("redraft_describe")
        except EngineAway:
            raise
        except EngineTrouble as error:
            raise EngineTrouble(f"{error}. {STARTED_WITH}") from error
        described = Described(**{name: said[name] for name in Described.__dataclass_fields__})
        if described.draft is None:
            raise EngineTrouble(f"this vLLM runs no draft model of its own (method: {described.method})")
        if described.workers != 1:
            raise EngineTrouble(f"this vLLM has {described.workers} workers: pushes know how to check one only")
        return described

    def check(self, path: str, sha256: str) -> list[str]:
        """Why the file cannot be served; it is kept at hand where it can."""
        problems: list[str] = self._worker("redraft_check", path, sha256)["problems"]
        return problems

    def target(self, columns: int) -> str:
        return str(self._worker("redraft_target", str(columns))["fingerprint"])

    def verify(self, path: str, sha256: str, columns: int) -> list[str]:
        """The draft's tensors that are not those of the file."""
        differing: list[str] = self._worker("redraft_verify", path, sha256, str(columns))["differing"]
        return differing

    def speculate(self, on: bool) -> None:
        said = self._worker("redraft_speculate", "on" if on else "off")
        if said["speculating"] != on:
            raise EngineTrouble(f"speculation cannot be turned off ({said.get('refused', '')})")

    def reload_target(self) -> None:
        """Load the target again from where the engine started it."""
        self._post("/collective_rpc", {"method": "reload_weights"})

    def pause(self) -> None:
        """No step is under way when this returns; requests wait."""
        self._post("/pause?mode=keep")

    def resume(self) -> None:
        self._post("/resume")

    def start(self) -> None:
        self._post("/start_draft_weight_update")

    def load(self, path: str, sha256: str) -> None:
        self._post("/update_weights", {"update_info": {"path": path, "sha256": sha256}})

    def abandon(self) -> None:
        """End an update session if there is one: the plugin's update raises, which is how vLLM ends one."""
        answer = self._send("/update_weights", {"update_info": {"abandon": True}})
        if answer.status_code != httpx2.codes.INTERNAL_SERVER_ERROR:
            raise EngineTrouble(f"{self.url}/update_weights answered {answer.status_code} where it had to refuse")

    def finish(self, label: str) -> None:
        self._post("/finish_weight_update", {"weight_version": label})

    def forget_cache(self) -> bool:
        """Have running requests read their text again, so that no state of the draft before is left."""
        return bool(self._post("/reset_prefix_cache?reset_running_requests=true").json().get("success"))

    def name(self, label: str) -> None:
        """Have the engine call its weights so, without any update."""
        self._post("/update_weight_version", {"new_version": label})

    def label(self) -> str:
        """What the engine calls its weights."""
        try:
            answer = self._client.get("/weight_info")
        except httpx2.HTTPError as error:
            raise EngineAway(f"{self.url} is not reached ({type(error).__name__})") from error
        return str(_checked(answer).json()["weight_version"])

    def _worker(self, method: str, *args: str) -> dict[str, Any]:
        answer = self._post("/collective_rpc", {"method": method, "args": list(args)})
        said: dict[str, Any] = answer.json()["results"][0]
        return said

    def _post(self, path: str, body: dict[str, Any] | None = None) -> httpx2.Response:
        return _checked(self._send(path, body))

    def _send(self, path: str, body: dict[str, Any] | None) -> httpx2.Response:
        try:
            return self._client.post(path, json=body or {})
        except httpx2.HTTPError as error:
            raise EngineAway(f"{self.url}{path} is not reached ({type(error).__name__})") from error


STARTED_WITH = (
    "Start vLLM with VLLM_SERVER_DEV_MODE=1, --worker-extension-cls service.hosts.vllm_plugin.worker.RedraftWorker and "
    """--weight-transfer-config '{"backend": "redraft_file"}' (docs/hosts.md)"""
)


def _checked(answer: httpx2.Response) -> httpx2.Response:
    if answer.is_success:
        return answer
    raise EngineTrouble(f"{answer.request.url} answered {answer.status_code}: {_message(answer)[:500]}")


def _message(answer: httpx2.Response) -> str:
    try:
        body = answer.json()
    except ValueError:
        return answer.text
    error = body.get("error", body) if isinstance(body, dict) else body
    return str(error.get("message", error) if isinstance(error, dict) else error)


def _own_addresses() -> set[str]:
    """This machine's addresses that others may reach, as far as they can be told."""
    found: set[str] = set()
    with suppress(OSError):  # a machine that does not know its own name
        found |= {str(info[4][0]) for info in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):  # no route
        probe.connect(("192.0.2.1", 9))  # nothing is sent: only the route is looked up
        found.add(probe.getsockname()[0])
    return {address for address in found if not is_loopback(address)}
