"""One update session on a running vLLM: pause, load, verify, resume. Where it fails, push.py puts things right."""

from collections.abc import Callable
from dataclasses import dataclass

from service.hosts.loopback import EngineTrouble
from service.hosts.vllm_push.control import Control
from storage.pushes import Weights

Note = Callable[[str, str], None]  # state and detail, kept in SQL


class PushFailed(RuntimeError):
    """The engine does not hold what it was given."""


class TargetChanged(RuntimeError):
    """The target's weights are not what they were: the engine's text is no longer the target's."""


@dataclass(frozen=True)
class Session:
    control: Control
    columns: int  # of each matrix that are read back
    reset_cache: bool

    def run(self, weights: Weights, target: str, note: Note) -> str:
        """Serve `weights`; returns what is worth knowing about it. Whatever it raises, the engine may be paused.

        Speculation is off from before the session to after the check, so that an engine that is resumed in the
        middle, by whomever, never runs a draft that is half of one version.
        """
        self.control.pause()
        note("paused", "")
        self.control.speculate(False)
        self.control.start()
        self.control.load(weights.checkpoint, weights.sha256)
        self.control.finish(weights.label)
        note("loaded", "")
        self._check_draft(weights)
        self.check_target(target)
        note("verified", "")
        detail = self._forget_cache()
        self.control.speculate(True)
        self.control.resume()
        return detail

    def check_target(self, target: str) -> None:
        """Raise `TargetChanged` unless the target is what it was, or is so again once loaded anew from its files."""
        if self.control.target(self.columns) == target:
            return
        self.control.reload_target()
        if self.control.target(self.columns) != target:
            raise TargetChanged("the target's weights were changed, and loading them again did not bring them back")

    def _check_draft(self, weights: Weights) -> None:
        wrong = self.control.verify(weights.checkpoint, weights.sha256, self.columns)
        if wrong:
            more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
            raise PushFailed(f"the engine's draft is not what was loaded: {', '.join(wrong[:3])}{more}")

    def _forget_cache(self) -> str:
        """A cache that is kept costs acceptance for a while, never text: no reason to fail."""
        if not self.reset_cache:
            return "the prefix cache was kept"
        try:
            return "" if self.control.forget_cache() else "the prefix cache could not be reset"
        except EngineTrouble as error:
            return f"the prefix cache could not be reset ({error})"
