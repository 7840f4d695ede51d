"""Pushes a version's weights into a running SGLang that runs the drafter itself (STANDALONE).

pause (requests go back to the queue) -> open a session on the draft alone -> the plugin's loader reads the file that
the pointer names -> close -> the draft's checksum is another, the target's is the same -> forget the cache -> go on.
Where it fails, the version before is pushed again in a session of its own; where the target changed, SGLang is left
paused, as it would answer with another model's text.

Held against SGLang's own sources by `make test-contracts`, and never run live.
"""

import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import structlog

from service.hosts.loopback import EngineTrouble
from service.hosts.sglang.control import DRAFT, TARGET, Control
from service.hosts.sglang_plugin.pointer import Answer, PointerConfig, Wanted, read_answers, write_wanted
from service.hosts.swapping import WEIGHTS, SwapFailed, sha256_of
from storage.config import setting
from storage.registry import Version

UNDER_WAY, CHANGED = "under way", "the target changed"
STARTED_WITH = (
    "start SGLang with --speculative-algorithm STANDALONE, --speculative-draft-model-path, and "
    "--custom-weight-loader service.hosts.sglang_plugin.loader.load_from_pointer, with redraft in its environment"
)

log = structlog.get_logger()


@dataclass(frozen=True)
class SglangPushConfig:
    """How weights are pushed into SGLang."""

    sglang_seconds: float = setting(300.0, "seconds that one of SGLang's control routes may take during a push")
    sglang_key: str = setting("", "SGLang's --admin-api-key, where it has one")


class LeftPaused(RuntimeError):
    """The target is not what it was; nothing must be served until SGLang was started again."""


class SglangPush:
    """A `Swapper`. Raises `NotLoopback` where the url is another machine's. Used by one thread."""

    def __init__(
        self, url: str, config: SglangPushConfig = SglangPushConfig(), pointer: PointerConfig | None = None
    ) -> None:
        self.control = Control(url, config.sglang_seconds, config.sglang_key)
        self._pointer = (pointer or PointerConfig()).sglang_pointer.expanduser()
        self._mark = self._pointer.with_suffix(".push")  # there while a push is under way, whoever makes it
        self._served: Wanted | None = None  # pushed and seen to be loaded; None: what SGLang was started with
        self._checksums: dict[str, list[str]] = {}  # of the draft, by the sha256 of the file pushed

    def close(self) -> None:
        self.control.close()

    def recover(self) -> None:
        """Let an SGLang go on that a push was cut off in; call once at start. The next swap pushes again.

        Raises `SwapFailed` where it must not go on.
        """
        if not self._mark.exists():
            return
        if self._mark.read_text() != UNDER_WAY:
            raise SwapFailed(f"SGLang's target is not what it was: start it again, and remove {self._mark}")
        with suppress(EngineTrouble):
            self.control.end()
        self._resume()
        self._mark.unlink()

    def swap(self, version: Version, checkpoint: Path) -> None:
        """Serve `version` from the folder `checkpoint`. Raises `SwapFailed`."""
        try:
            wanted = _wanted(version, checkpoint)
        except OSError as error:
            raise SwapFailed(f"{checkpoint} cannot be read ({error}): SGLang serves {self._now()} as before") from error
        try:
            if self._is_served(wanted):
                return
            ranks, target = self.control.ranks(), self.control.checksum(TARGET)
        except EngineTrouble as trouble:
            raise SwapFailed(
                f"SGLang cannot be pushed to ({trouble}): nothing was changed. {STARTED_WITH}"
            ) from trouble
        began = time.monotonic()
        self._push(wanted, ranks, target)
        log.info("sglang.pushed", version=version.number, milliseconds=round((time.monotonic() - began) * 1000))

    def _push(self, wanted: Wanted, ranks: int, target: Sequence[str]) -> None:
        self._mark.parent.mkdir(parents=True, exist_ok=True)
        self._mark.write_text(UNDER_WAY)
        try:
            self._pushed_or_back(wanted, ranks, target)
        except LeftPaused as changed:
            self._mark.write_text(CHANGED)
            raise SwapFailed(f"{changed}. SGLang is left paused: start it again, and remove {self._mark}") from changed
        finally:
            if self._mark.read_text() == UNDER_WAY:
                self._resume()
                self._mark.unlink()

    def _pushed_or_back(self, wanted: Wanted, ranks: int, target: Sequence[str]) -> None:
        try:
            self.control.pause()
            self._session(wanted, ranks, target)
            self._served = wanted
        except EngineTrouble as trouble:
            self._go_back(wanted, ranks, target, trouble)

    def _session(self, wanted: Wanted, ranks: int, target: Sequence[str]) -> None:
        """Load it, and look at what came of it; while nothing runs."""
        write_wanted(self._pointer, wanted)
        self._begin()
        try:
            self.control.load(ranks, f"{wanted.drafter}/{wanted.version}")
        finally:
            self.control.end()
        if self.control.checksum(TARGET) != list(target):
            raise LeftPaused("the target's weights changed during a push that named the draft alone")
        _check(read_answers(self._pointer, wanted.push), ranks)
        draft = self.control.checksum(DRAFT)
        if draft != self._checksums.setdefault(wanted.sha256, draft):
            raise EngineTrouble("the draft's weights are not those that this file gave before")
        self.control.flush()

    def _begin(self) -> None:
        """A session on the draft; one that a push left open is closed first."""
        try:
            self.control.begin()
        except EngineTrouble:
            self.control.end()
            self.control.begin()

    def _go_back(self, wanted: Wanted, ranks: int, target: Sequence[str], trouble: EngineTrouble) -> None:
        """Push what was served before; raises `SwapFailed` in any case."""
        before = self._served
        if before is None:
            raise SwapFailed(
                f"version {wanted.version} was not loaded ({trouble}), and there is none before it to go back to: "
                f"SGLang's text is right, but what it drafts with may be useless until a push succeeds or it is "
                f"started again. {STARTED_WITH}"
            ) from trouble
        again = Wanted(uuid.uuid4().hex, before.drafter, before.version, before.path, before.sha256)
        try:
            self._session(again, ranks, target)
        except EngineTrouble as second:
            self._served = None
            raise SwapFailed(
                f"version {wanted.version} was not loaded ({trouble}), nor was version {before.version} ({second}): "
                f"SGLang's text is right, but what it drafts with may be useless; start it again"
            ) from second
        self._served = again
        raise SwapFailed(
            f"version {wanted.version} was not loaded ({trouble}): SGLang serves version {before.version} again"
        ) from trouble

    def _is_served(self, wanted: Wanted) -> bool:
        """Whether these weights are in SGLang; after it was started again, they are not."""
        served = self._served
        if served is None or served.sha256 != wanted.sha256:
            return False
        if self.control.checksum(DRAFT) == self._checksums.get(wanted.sha256):
            return True
        self._served = None
        return False

    def _now(self) -> str:
        return f"version {self._served.version}" if self._served else "what it was started with"

    def _resume(self) -> None:
        try:
            self.control.resume()
        except EngineTrouble as trouble:
            raise SwapFailed(f"SGLang does not go on after a push ({trouble}): start it again") from trouble


def _wanted(version: Version, checkpoint: Path) -> Wanted:
    digest = sha256_of(checkpoint / WEIGHTS)
    return Wanted(uuid.uuid4().hex, version.drafter, version.number, str(checkpoint.absolute()), digest)


def _check(answers: Sequence[Answer], ranks: int) -> None:
    """Every rank has loaded it."""
    failed = next((answer for answer in answers if not answer.loaded), None)
    if failed is not None:
        where = "nothing was touched" if failed.untouched else "it is loaded in part"
        raise EngineTrouble(f"the loader refused: {failed.error}; {where}")
    if len(answers) != ranks:
        raise EngineTrouble(f"{len(answers)} of {ranks} ranks said that they loaded it. {STARTED_WITH}")
