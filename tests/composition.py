"""docker-compose.yml without Docker: its services as processes of this machine.

Commands, environments and health checks are taken from the file. Only what a container would give is
rewritten: host names, paths and ports; `redraft` and `python` are those of this checkout.
"""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from tests.test_packages import CHECKOUT

COMPOSE = CHECKOUT / "docker-compose.yml"
VARIABLE = re.compile(r"\$\{(\w+):([-?])([^}]*)\}")
SLOWNESS = 4  # how many times as slow as production a busy test machine may be
CLEAN_EXITS = {0, -signal.SIGTERM, 128 + signal.SIGTERM}


class VariableNotSet(ValueError):
    """The file asks for a variable that has no default."""


def composed(environ: Mapping[str, str]) -> dict[str, Any]:
    """The file with its `${NAME:-default}` and `${NAME:?message}` filled from `environ`."""

    def value(found: re.Match[str]) -> str:
        name, kind, rest = found.groups()
        if environ.get(name):
            return environ[name]
        if kind == "?":
            raise VariableNotSet(f"{name}: {rest}")
        return rest

    def filled(node: Any) -> Any:
        if isinstance(node, dict):
            return {key: filled(item) for key, item in node.items()}
        if isinstance(node, list):
            return [filled(item) for item in node]
        return VARIABLE.sub(value, node) if isinstance(node, str) else node

    file: dict[str, Any] = filled(yaml.safe_load(COMPOSE.read_text()))
    return file


def seconds(duration: str) -> float:
    """`90s` or `10m` in seconds."""
    return float(duration[:-1]) * {"s": 1, "m": 60}[duration[-1]]


class Composition:
    """The services of the file; `rewrites` maps what stands there to what is true here."""

    def __init__(self, services: Mapping[str, Any], rewrites: Mapping[str, str], folder: Path) -> None:
        self.services, self._rewrites, self.folder = services, rewrites, folder
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def environ(self, name: str) -> dict[str, str]:
        """What the service's process sees: the image's environment, and the file's."""
        ours = {key: value for key, value in os.environ.items() if not key.startswith(("REDRAFT_", "PG"))}
        image = {
            "PYTHONPATH": str(CHECKOUT),
            "PYTHONDONTWRITEBYTECODE": "1",
            "HOME": str(self.folder / "nobody"),
        }
        given = self.services[name]["environment"]
        return {**ours, **image, **{key: self._rewritten(str(value)) for key, value in given.items()}}

    def execute(self, name: str, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        """Run a command in the service's environment, as `docker compose exec` does."""
        return subprocess.run(
            self._local(command),
            env=self.environ(name),
            cwd=CHECKOUT,
            capture_output=True,
            text=True,
            timeout=300,
        )

    def start(self, name: str) -> None:
        with self.log(name).open("wb") as output:
            self._running[name] = subprocess.Popen(
                self._local(self.services[name]["command"]),
                env=self.environ(name),
                cwd=CHECKOUT,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )

    def healthy(self, name: str) -> bool:
        """Whether the service's own health check passes."""
        kind, *command = self.services[name]["healthcheck"]["test"]
        assert kind == "CMD"
        return self.execute(name, command).returncode == 0

    def ended(self, name: str) -> bool:
        return self._running[name].poll() is not None

    def stop(self, name: str) -> int:
        """Ask the process to end. It gets SLOWNESS times what Compose gives it (10 s by default)."""
        process = self._running.pop(name)
        process.terminate()
        return process.wait(SLOWNESS * seconds(self.services[name].get("stop_grace_period", "10s")))

    def kill(self, name: str) -> None:
        """The machine takes the process away."""
        process = self._running.pop(name)
        process.kill()
        process.wait()

    def close(self) -> None:
        """End what a failed test left running."""
        for process in self._running.values():
            process.kill()
            process.wait()

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def _local(self, command: Sequence[str]) -> list[str]:
        programs = {"redraft": [sys.executable, "-m", "cli"], "python": [sys.executable]}
        return [*programs[command[0]], *(self._rewritten(part) for part in command[1:])]

    def _rewritten(self, text: str) -> str:
        for there, here in self._rewrites.items():
            text = text.replace(there, here)
        return text
