"""The guard against lossy engines: whether an engine's verification keeps the target's text, from all that a host sees.

An engine may be told to accept what the target would not have said. What it accepts then says nothing of a drafter, so
its records are marked (`FeedbackRecord.lossless`), counted apart and never learnt from. In the order of their weight:
what the operator states, what the engine's settings say, and what its greedy answers show: at temperature 0 each token
must be the one that the target itself finds likeliest. Until one of these speaks, an engine counts as lossy.
"""

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from storage.capabilities import Capabilities, Losslessness
from storage.config import setting
from storage.records import FeedbackRecord
from storage.validation import contradicted

VLLM_LOSSLESS: Final = ("standard", "block")  # its rejection_sample_method
VLLM_OLD_LOSSLESS: Final = "rejection_sampler"  # spec_decoding_acceptance_method, of releases before 0.9
SGLANG_THRESHOLDS: Final = ("speculative_accept_threshold_single", "speculative_accept_threshold_acc")
SGLANG_SIMULATED: Final = ("simulate_acc_len", "SGLANG_SIMULATE_ACC_LEN")
LLAMACPP_SYNTHETIC: Final = ("synth_len", "synth_rates")
LLAMACPP_OPTION: Final = "--spec-synth"
CLEAN_TOKENS: Final = 256  # greedy tokens that were the target's own, after which an engine counts as lossless
ODD_SHARE: Final = 0.005  # of greedy tokens that are not: more than this, and more than two, is no rounding


@dataclass(frozen=True)
class LossyConfig:
    """What the operator knows of an engine that redraft only sees from outside."""

    engine_lossless: Literal["auto", "yes", "no"] = setting(
        "auto",
        "whether the engine beside which redraft runs verifies without loss; auto: as its settings say, or else its "
        "greedy answers show, and not before",
    )


@dataclass(frozen=True)
class Seen:
    """What an engine's settings say: nothing of it (not `known`), or which of them change the text."""

    known: bool
    lossy: tuple[str, ...] = ()


UNSEEN: Final = Seen(False)


def vllm(speculative: Mapping[str, Any] | None) -> Seen:
    """Of vLLM's speculative configuration; None: it does not speculate."""
    given = speculative or {}
    method = _plain(given.get("rejection_sample_method") or VLLM_LOSSLESS[0])
    old = _plain(given.get("spec_decoding_acceptance_method") or VLLM_OLD_LOSSLESS)
    lossy = [] if method in VLLM_LOSSLESS else [f"rejection_sample_method={method}"]
    if old != VLLM_OLD_LOSSLESS:
        lossy.append(f"spec_decoding_acceptance_method={old}")
    lossy += [f"{name}={given[name]}" for name in sorted(given) if name.startswith("synthetic_") and given[name]]
    return Seen(True, tuple(lossy))


def vllm_server(info: Mapping[str, Any]) -> Seen:
    """Of what `/server_info?config_format=json` answers, which vLLM has in development mode only."""
    config = info.get("vllm_config")
    return vllm(config.get("speculative_config")) if isinstance(config, Mapping) else UNSEEN


def sglang_server(info: Mapping[str, Any]) -> Seen:
    """Of what `/server_info` answers: as started, and as each scheduler is now: thresholds can be set while it runs.

    A simulated acceptance length is an environment variable that it does not always tell of.
    """
    states = [state for state in info.get("internal_states") or [] if isinstance(state, Mapping)]
    if not any(name in place for place in (info, *states) for name in SGLANG_THRESHOLDS):
        return UNSEEN
    return Seen(True, tuple(dict.fromkeys(_sglang_settings((info, *states)))))


def _sglang_settings(places: Iterable[Mapping[str, Any]]) -> Iterable[str]:
    for place in places:
        for name in SGLANG_THRESHOLDS:
            if isinstance(value := place.get(name), int | float) and value < 1:
                yield f"{name}={value:g}"
        for name in SGLANG_SIMULATED:
            if isinstance(value := place.get(name), int | float) and value > 0:
                yield f"{name}={value:g}"


def llamacpp(props: Mapping[str, Any]) -> Seen:
    """Of what `/props` answers. Without a word of synthetic acceptance in it, it says nothing of it either way."""
    named = dict(_endings(props))
    known = any(name in named for name in LLAMACPP_SYNTHETIC)
    return Seen(known, tuple(f"{name}={named[name]}" for name in LLAMACPP_SYNTHETIC if _set(named.get(name))))


def llamacpp_command(command: str) -> Seen:
    """Of the command line that starts a llama-server."""
    return Seen(True, tuple(word for word in command.split() if word.startswith(LLAMACPP_OPTION)))


def _endings(props: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    """Every setting by the last word of its name, however deep it stands: `speculative.synth_len` is `synth_len`."""
    for name, value in props.items():
        if isinstance(value, Mapping):
            yield from _endings(value)
        else:
            yield name.rpartition(".")[2], value


def _set(value: Any) -> bool:
    return bool(value) and not (isinstance(value, int | float) and value < 0)


def _plain(value: Any) -> str:
    return str(getattr(value, "value", value))


class Guard:
    """What is known of one engine. Asked for each record; told from any thread."""

    def __init__(self, config: LossyConfig = LossyConfig(), seen: Seen = UNSEEN) -> None:
        """`seen` is what is known from the start, of an engine that redraft is inside of or starts itself."""
        self._stated, self._known, self._seen = config.engine_lossless, seen, seen
        self._tokens, self._odd = 0, 0  # of greedy answers: looked at, and not the target's own
        self._lock = threading.Lock()

    def saw(self, seen: Seen) -> None:
        """The engine's settings as they are now. Once seen, they are not forgotten for an engine that falls silent."""
        if seen.known:
            self._seen = seen

    def answered(self, record: FeedbackRecord) -> None:
        """Look at an answer; only a greedy one with the target's own rows says anything."""
        looked, odd = contradicted(record)
        with self._lock:
            self._tokens, self._odd = self._tokens + looked, self._odd + odd

    def restarted(self) -> None:
        """The engine is another process now: what was seen of the one before counts no more."""
        with self._lock:
            self._seen, self._tokens, self._odd = self._known, 0, 0

    @property
    def losslessness(self) -> Losslessness:
        if self._stated != "auto":
            return "lossless" if self._stated == "yes" else "lossy"
        if self._seen.lossy or self._is_odd():
            return "lossy"
        return "lossless" if self._seen.known or self._tokens >= CLEAN_TOKENS else "unknown"

    @property
    def lossless(self) -> bool:
        """For the records: what is not known to be lossless is not."""
        return self.losslessness == "lossless"

    @property
    def settings(self) -> tuple[str, ...]:
        """What makes the engine lossy, as far as it is known."""
        odd = (f"{self._odd} of {self._tokens} greedy tokens are not the target's own",) if self._is_odd() else ()
        stated = ("REDRAFT_ENGINE_LOSSLESS=no",) if self._stated == "no" else ()
        return (*self._seen.lossy, *odd, *stated)

    def applied(self, capabilities: Capabilities) -> Capabilities:
        """The host's capabilities with what is known now."""
        return replace(capabilities, losslessness=self.losslessness, lossy_settings=self.settings)

    def _is_odd(self) -> bool:
        return self._odd > max(2.0, ODD_SHARE * self._tokens)
