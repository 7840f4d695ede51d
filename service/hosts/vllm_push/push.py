"""Pushes a version's weights into a running vLLM, and puts right what a push left that went wrong.

staged -> checked by the engine (nothing is touched) -> the session (session.py) -> active; where the session fails,
the version before is pushed again, and where that fails too, speculation is turned off: requests then decode plainly.
Each step is a row (storage/pushes) written before the next begins, so that after a crash `recover` knows where it was;
until then the guard (guard.py) has let the engine go on without speculation.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import gettempdir
from typing import NoReturn

import structlog
from filelock import FileLock, Timeout
from sqlalchemy.exc import SQLAlchemyError

from service.hosts.loopback import EngineTrouble, NotLoopback
from service.hosts.swapping import WEIGHTS, SwapFailed
from service.hosts.vllm_push.control import Control, Described
from service.hosts.vllm_push.guard import Guard, GuardFailed
from service.hosts.vllm_push.session import PushFailed, Session, TargetChanged
from service.hosts.vllm_push.staging import NotStaged, Staging
from storage.config import setting
from storage.pushes import SERVING, Pushes, Weights
from storage.registry import Version

START_LABEL = "default"  # vLLM's own name for what it started with
TRIES = 3  # of one version on one run of the engine: each failed one pauses all requests twice

log = structlog.get_logger()


@dataclass(frozen=True)
class VllmPushConfig:
    """How weights are pushed into a vLLM that runs the drafter itself."""

    push_seconds: float = setting(60.0, "seconds that one call to vLLM's control routes may take during a push")
    push_columns: int = setting(64, "columns of each matrix that are read back from vLLM after a push; 0: all")
    push_reset_cache: bool = setting(
        True, "after a push running requests read their text again, so that nothing of the drafter before is left"
    )


class VllmPush:
    """A `Swapper`: one vLLM on this machine. Used by one thread; other processes are kept out by a lock."""

    def __init__(self, url: str, pushes: Pushes, staging: Path, config: VllmPushConfig = VllmPushConfig()) -> None:
        """Raises `NotLoopback` where the url is another machine's."""
        self.control = Control(url, config.push_seconds)
        self.endpoint = self.control.url
        self._pushes = pushes
        self._staging = Staging(staging / f"vllm-{self.control.port}")
        self._session = Session(self.control, config.push_columns, config.push_reset_cache)
        self._lock = FileLock(Path(gettempdir()) / f"redraft-push-{self.control.port}.lock", thread_local=False)
        self._failures: Counter[tuple[str, str]] = Counter()

    def close(self) -> None:
        self.control.close()

    def recover(self) -> None:
        """Put right what a push left that was cut off; call once at start. Raises `SwapFailed`."""
        with self._alone():
            self._settle(self._describe())

    def swap(self, version: Version, checkpoint: Path) -> None:
        """Serve `version` from `checkpoint`, a folder with model.safetensors; see `Swapper`."""
        with self._alone():
            engine = self._describe()
            self._settle(engine)
            weights = self._stage(version, checkpoint)
            if not self._serves(engine, weights):
                self._push(engine, weights)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        try:
            with self._lock.acquire(timeout=0):
                yield
        except Timeout as error:
            raise SwapFailed(
                f"another process is pushing to {self.endpoint}: one server follows for an engine"
            ) from error

    def _describe(self) -> Described:
        try:
            self.control.check_private()
            return self.control.describe()
        except (EngineTrouble, NotLoopback) as error:
            raise SwapFailed(f"{error}. The engine was not touched") from error

    def _stage(self, version: Version, checkpoint: Path) -> Weights:
        try:
            return self._staging.stage(checkpoint, f"{version.drafter}/{version.number}", version.id)
        except NotStaged as error:
            raise SwapFailed(f"{error}. The engine was not touched") from error

    def _serves(self, engine: Described, weights: Weights) -> bool:
        """Whether the engine serves these weights already: by its rows, or, on its first push, by a look."""
        latest = self._pushes.latest(self.endpoint)
        if latest is not None and latest.engine == engine.engine:
            same = (latest.label, latest.sha256) == (weights.label, weights.sha256)
            return same and latest.state in SERVING and engine.speculating
        try:
            if self.control.verify(weights.checkpoint, weights.sha256, self._session.columns):
                return False
            self.control.name(weights.label)
        except EngineTrouble:
            return False  # the push itself will say what is wrong
        self._note("active", engine, weights, detail="it was served already")
        return True

    def _push(self, engine: Described, weights: Weights) -> None:
        before = self._before(engine)
        target = self._check(engine, weights, before)
        self._note("pushing", engine, weights, target, must=True)
        with self._guarded(engine, weights) as guard:
            try:
                detail = self._session.run(weights, target, partial(self._noted, engine, weights, target))
            except (EngineTrouble, PushFailed, TargetChanged) as error:
                self._failures[engine.engine, weights.sha256] += 1
                self._restore(engine, before, target, f"{weights.label} was not served: {error}", guard)
            guard.done()
        self._note("active", engine, weights, target, detail)
        self._staging.keep(weights, before)

    def _check(self, engine: Described, weights: Weights, before: Weights | None) -> str:
        """The target's fingerprint; raises `SwapFailed` where the engine would not take the weights."""
        serves = f"The engine was not touched and {self._now(engine, before)}"
        if self._failures[engine.engine, weights.sha256] >= TRIES:
            raise SwapFailed(
                f"{weights.label} failed {TRIES} times on this run of vLLM and is not tried again. {serves}"
            )
        try:
            if not engine.speculating:
                self.control.abandon()  # what a push that ended in plain decoding may have left open
            problems = self.control.check(weights.checkpoint, weights.sha256)
            target = self.control.target(self._session.columns)
        except EngineTrouble as error:
            raise SwapFailed(f"{error}. {serves}") from error
        if problems:
            reason = f"{len(problems)} problems, the first: {problems[0]}"
            self._note("refused", engine, weights, detail=reason)
            raise SwapFailed(f"{weights.label} does not fit vLLM's draft model ({reason}). {serves}")
        return target

    def _now(self, engine: Described, before: Weights | None) -> str:
        """What the engine does, for people."""
        if not engine.speculating:
            return "decodes without speculation"
        return f"serves {before.label if before else 'what it started with'}"

    def _settle(self, engine: Described) -> None:
        """Go back to the version before, where a push was cut off."""
        step = self._pushes.latest(self.endpoint)
        if step is None or step.settled:
            return
        before = self._before(engine)
        if step.engine != engine.engine:
            started = before or Weights(START_LABEL, "", "", None)
            self._note("restored", engine, started, detail="vLLM was started anew after a push was cut off")
            return
        with self._guarded(engine, step.weights) as guard:
            cause = f"the push of {step.label} was cut off when it was {step.state}"
            try:
                self._restore(engine, before, step.target, cause, guard)
            except Restored as done:
                log.warning("push.recovered", endpoint=self.endpoint, reason=str(done))

    def _restore(self, engine: Described, before: Weights | None, target: str, cause: str, guard: Guard) -> NoReturn:
        """Bring the engine back to `before`, or turn speculation off; `Restored` is raised at best."""
        log.warning("push.failed", endpoint=self.endpoint, reason=cause)
        weights = before or Weights(START_LABEL, "", "", None)
        self._note("restoring", engine, weights, target, cause)
        try:
            if before is None:
                raise PushFailed("the version before is not known")
            self.control.abandon()
            detail = self._session.run(before, target, partial(self._noted, engine, before, target))
        except (EngineTrouble, PushFailed, TargetChanged) as error:
            self._give_up(engine, weights, target, f"{cause}; then {weights.label}: {error}", guard)
        guard.done()
        self._note("restored", engine, before, target, detail or cause)
        raise Restored(f"{cause}. The engine serves {before.label} again")

    def _give_up(self, engine: Described, weights: Weights, target: str, cause: str, guard: Guard) -> NoReturn:
        """Let requests decode plainly; not with another target, though: then they wait. Always raises."""
        try:
            self.control.speculate(False)
            self._session.check_target(target)
            self.control.resume()
        except TargetChanged as error:
            guard.done()
            self._note("unknown", engine, weights, target, f"{cause}; {error}")
            raise SwapFailed(f"{cause}; {error}. vLLM was left paused: restart it now") from error
        except EngineTrouble as error:
            self._note("unknown", engine, weights, target, f"{cause}; {error}")
            raise SwapFailed(f"{cause}; {error}. What vLLM serves is not known: restart it") from error
        guard.done()
        self._note("off", engine, weights, target, cause)
        raise SwapFailed(f"{cause}. vLLM decodes without speculation: restart it, or promote a version that fits")

    def _before(self, engine: Described) -> Weights | None:
        """What the engine was last known to serve: a version, or the checkpoint that it started with."""
        step = self._pushes.served(self.endpoint, engine.engine)
        if step is not None:
            return step.weights
        try:
            return self._staging.stage(Path(engine.draft or ""), START_LABEL, None)
        except NotStaged as error:
            log.warning("push.start_unknown", endpoint=self.endpoint, reason=str(error), file=WEIGHTS)
            return None

    @contextmanager
    def _guarded(self, engine: Described, weights: Weights) -> Iterator[Guard]:
        try:
            guard = Guard(self.endpoint)
        except GuardFailed as error:
            self._note("refused", engine, weights, detail=str(error))
            raise SwapFailed(f"{error}. The engine was not touched") from error
        with guard:
            yield guard

    def _noted(self, engine: Described, weights: Weights, target: str, state: str, detail: str) -> None:
        self._note(state, engine, weights, target, detail)

    def _note(
        self, state: str, engine: Described, weights: Weights, target: str = "", detail: str = "", must: bool = False
    ) -> None:
        """Keep a step. In the middle of a push, with all requests waiting, a database that is away stops nothing."""
        log.info(f"push.{state}", endpoint=self.endpoint, weights=weights.label, detail=detail)
        try:
            self._pushes.note(self.endpoint, engine.engine, state, weights, target, detail)
        except SQLAlchemyError as error:
            if must:
                raise SwapFailed(
                    f"the database is away ({type(error).__name__}). The engine was not touched"
                ) from error
            log.warning("push.not_noted", state=state, error=type(error).__name__)


class Restored(SwapFailed):
    """The version was not served, and the one before is served again."""
