"""Everything on one machine: Valkey, migrations, a first drafter, then serve, trainer, housekeeper and beat.

`with Stack(config, environ) as stack:` is `redraft up` for a program: inside the block everything runs and is
restarted when it dies; after it, nothing is left. All state stays in the home folder.
"""

import fcntl
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import IO

from cli.children import Child, answers, child_environ, redraft
from cli.settings import CommandConfig
from storage.config import StorageConfig, read, variable
from storage.database import migrate, open_database
from storage.registry import Registry
from storage.servers import WORKERS, Servers
from storage.valkey import answers as valkey_answers

COMMANDS = {"serve": ("serve", "--drain", "3")}  # others are called as their command
READY_SECONDS = 300.0
TICK_SECONDS = 0.2
STOP_SECONDS = 6.0  # for serving and the worker to end in order
STOP_VALKEY_SECONDS = 3.0


class StackFailed(RuntimeError):
    """A part of the stack did not start."""


class Stack:
    """The supervised processes. `say` gets a line whenever something happens."""

    def __init__(
        self,
        config: StorageConfig,
        environ: Mapping[str, str],
        say: Callable[[str], None] = lambda line: None,
        init: Sequence[str] = (),
    ) -> None:
        """`init` holds further arguments of `redraft init`, which runs where there is no drafter yet."""
        self.config = replace(config, home=config.home.absolute())
        self._environ = {**environ, variable("home"): str(self.config.home)}
        self._say, self._init = say, tuple(init)
        self.logs = self.config.home / "logs"
        self.children: dict[str, Child] = {}
        self._watcher = threading.Thread(target=self._watch, name="watch", daemon=True)
        self._stopping = threading.Event()
        self._lock: IO[str] | None = None
        self.url = ""

    def __enter__(self) -> "Stack":
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    def start(self) -> None:
        """Start all parts and wait until each has given a sign of life."""
        self.logs.mkdir(parents=True, exist_ok=True)
        self._lock_home()
        if not self.config.redis_url:
            self._start("valkey")
            self._wait_for("valkey", lambda: valkey_answers(self.config.socket))
        database = open_database(self.config.sql_url)
        migrate(database)
        if name := self._lacking(Registry(database)):
            self._make_drafter(name)
        for name in ("serve", *WORKERS):
            self._start(name)
        self.url = self._address()
        self._wait_for("serve", lambda: answers(f"{self.url}/health/ready"))
        for name in WORKERS:
            pid = self.children[name].pid
            self._wait_for(name, partial(_beating, Servers(database), name, pid))
        database.dispose()
        self._watcher.start()

    def _lock_home(self) -> None:
        lock = (self.config.home / "up.lock").open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            lock.close()
            raise StackFailed(
                f"redraft is running in {self.config.home} already: stop it, or set REDRAFT_HOME to another folder"
            ) from error
        self._lock = lock

    def _start(self, name: str) -> None:
        child = Child(name, redraft(*COMMANDS.get(name, (name,))), self._environ, self.logs)
        self.children[name] = child
        child.start()

    def _address(self) -> str:
        """Where serving answers; asked for once the children are on their way, since it imports torch."""
        from service.app import ANYWHERE, ServeConfig

        config = read(ServeConfig, self._environ)
        host = "127.0.0.1" if config.host in ANYWHERE else config.host
        return f"http://[{host}]:{config.port}" if ":" in host else f"http://{host}:{config.port}"

    def _lacking(self, registry: Registry) -> str:
        """The name of the drafter that is to be made first; empty where the one that is asked for is there."""
        asked, names = read(CommandConfig, self._environ).drafter, {d.name for d in registry.drafters()}
        if asked:
            return "" if asked in names else asked
        return "" if names else "default"

    def _make_drafter(self, name: str) -> None:
        """Version 1 of a drafter, by `redraft init` in a process of its own, which gives its memory back."""
        self._say(f"there is no drafter {name!r} yet: making it with `redraft init`")
        command = redraft("init", name, *self._init)
        made = subprocess.run(command, env=child_environ(self._environ), stdin=subprocess.DEVNULL)
        if made.returncode:
            raise StackFailed(f"`redraft init {name}` failed: see above")

    def _wait_for(self, name: str, answers: Callable[[], bool]) -> None:
        """Wait until `answers`; raises `StackFailed` where the child ends first or takes too long."""
        child, deadline = self.children[name], time.monotonic() + READY_SECONDS
        while not answers():
            if child.exit_code is not None:
                raise StackFailed(f"{name} did not start: {child.last_line()} (its log: {child.log})")
            if time.monotonic() > deadline:
                raise StackFailed(f"{name} gave no sign of life in {READY_SECONDS:.0f} s: see {child.log}")
            self._stopping.wait(TICK_SECONDS)

    def _watch(self) -> None:
        """Restart what dies, until the stack stops."""
        while not self._stopping.wait(TICK_SECONDS):
            for child in self.children.values():
                if line := child.tend():
                    self._say(line)

    @property
    def serving(self) -> bool:
        """False when serving died too often to be restarted; the rest is not worth keeping then."""
        return not self.children["serve"].given_up

    def stop(self) -> None:
        """Stop everything: serving and the worker first, then Valkey, which they need for a clean end."""
        self._say("stopping")
        self._stopping.set()
        if self._watcher.is_alive():
            self._watcher.join()
        valkey = self.children.get("valkey")
        self._stop([child for child in self.children.values() if child is not valkey], STOP_SECONDS)
        self._stop([valkey] if valkey else [], STOP_VALKEY_SECONDS)
        self.children = {}
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _stop(self, children: Sequence[Child], seconds: float) -> None:
        for child in children:
            child.ask_to_stop()
        deadline = time.monotonic() + seconds
        for child in children:
            if not child.stop(deadline):
                self._say(f"{child.name} did not stop in {seconds:.0f} s and was killed; its state is in SQL")


def _beating(servers: Servers, role: str, pid: int | None) -> bool:
    """Whether the worker process `pid` has written its sign of life."""
    return any(s.host_kind == role and s.id.endswith(f":{pid}") for s in servers.live(""))
