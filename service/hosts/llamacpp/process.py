"""One llama-server: started with its log, waited for, asked whether it speculates, and ended.

What was started is written down beside the log, so that a server whose parent was killed is found and ended by the
next one.
"""

import json
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx2
import psutil

HOST = "127.0.0.1"
POLL_SECONDS = 0.1
ASK_SECONDS = 60.0  # for one short answer, on a machine that is busy with the other server
STOP_SECONDS = 10.0
LOG_BYTES = 10_000_000
WARM_UP = {"prompt": "Hello", "n_predict": 16, "temperature": 0, "cache_prompt": False}


class ServerFailed(RuntimeError):
    """A llama-server that does not serve; the message says what it said."""


class Process:
    """A llama-server on a free port of this machine."""

    def __init__(self, command: Sequence[str], drafter: Path, folder: Path) -> None:
        """`command` is started with `{port}` and `{drafter}` put in; its log is in `folder`."""
        self.port = _free_port()
        self.url = f"http://{HOST}:{self.port}"
        self.log = folder / "llama-server.log"
        self._note = folder / f"llama-server.{self.port}.json"
        self._command = [part.replace("{port}", str(self.port)).replace("{drafter}", str(drafter)) for part in command]
        self._process: subprocess.Popen[bytes] | None = None
        self._logged = 0  # bytes of the log that others wrote

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Raises `ServerFailed` where the command cannot be started at all."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        if self.log.exists() and self.log.stat().st_size > LOG_BYTES:
            self.log.replace(self.log.with_suffix(".log.1"))
        with self.log.open("ab") as output:
            self._logged = output.tell()
            try:
                self._process = subprocess.Popen(
                    self._command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
                )
            except OSError as error:
                raise ServerFailed(f"{self._command[0]} cannot be started: {error.strerror}") from error
        self._note.write_text(json.dumps({"pid": self._process.pid, "created": _created(self._process.pid)}))

    def wait_healthy(self, seconds: float) -> None:
        """Until the model is loaded. Raises `ServerFailed` where the process ends or the time is up."""
        deadline = time.monotonic() + seconds
        while not self._healthy():
            if not self.running:
                code = self._process.poll() if self._process else None
                raise ServerFailed(f"it ended with code {code} ({self.last_words()})")
            if time.monotonic() > deadline:
                raise ServerFailed(f"it was not healthy after {seconds:g} s ({self.last_words()})")
            time.sleep(POLL_SECONDS)

    def check_speculation(self) -> None:
        """Answer one short prompt, which also warms it up, and see that it drafts. Raises `ServerFailed`."""
        try:
            with httpx2.Client(base_url=self.url, timeout=ASK_SECONDS, trust_env=False) as client:
                said = client.post("/completion", json=WARM_UP).raise_for_status().json()
                drafts = bool(said.get("timings", {}).get("draft_n")) or _can_draft(client)
        except (httpx2.HTTPError, ValueError) as error:
            raise ServerFailed(f"it does not answer ({type(error).__name__}: {error}; {self.last_words()})") from error
        if not drafts:
            raise ServerFailed(f"it serves without the drafter ({self.last_words()})")

    def stop(self) -> None:
        """End it and what is left of it."""
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._note.unlink(missing_ok=True)

    def last_words(self) -> str:
        """The last line that it logged."""
        try:
            with self.log.open("rb") as log:
                log.seek(self._logged)
                lines = log.read().decode(errors="replace").strip().splitlines()
        except OSError:
            lines = []
        return f"last line of {self.log}: {lines[-1][-200:]}" if lines else f"nothing in {self.log}"

    def _healthy(self) -> bool:
        try:
            return httpx2.get(f"{self.url}/health", timeout=2.0, trust_env=False).status_code == httpx2.codes.OK
        except httpx2.HTTPError:
            return False


def _can_draft(client: httpx2.Client) -> bool:
    """What its slots say, of a drafter that was too unsure to propose anything; they may be turned off."""
    slots = client.get("/slots")
    return slots.status_code == httpx2.codes.OK and any(slot.get("speculative") for slot in slots.json())


def end_leftovers(folder: Path) -> int:
    """End the servers that a killed parent left running; how many there were."""
    ended = 0
    for note in folder.glob("llama-server.*.json"):
        with suppress(OSError, ValueError, KeyError, psutil.Error):
            ended += _end(json.loads(note.read_text()))
        note.unlink(missing_ok=True)
    return ended


def _end(note: dict[str, Any]) -> int:
    process = psutil.Process(note["pid"])
    if process.create_time() != note["created"]:
        return 0  # another process by now
    process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except psutil.TimeoutExpired:
        process.kill()
    return 1


def _created(pid: int) -> float:
    """When the process was started, which with its id tells it from every other one; 0.0: it is gone."""
    try:
        return psutil.Process(pid).create_time()
    except psutil.Error:
        return 0.0


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port
