"""Token ids to text as it grows, with stop strings held back until they are decided."""

from collections.abc import Sequence
from typing import Protocol


class Tokenizer(Protocol):
    """The one call that is needed of a transformers tokenizer."""

    def decode(self, token_ids: list[int], skip_special_tokens: bool) -> str: ...


class TextStream:
    """The text of one output. A character that needs further tokens, or a start of a stop string, is held back."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._tokens: list[int] = []
        self._context = 0  # decoding restarts here, so that a long output is not decoded again and again
        self._read = 0
        self._held = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """The text that this token completes, up to a stop string; then `stopped` is true."""
        self._tokens.append(token)
        before = self._decode(self._context, self._read)
        after = self._decode(self._context, len(self._tokens))
        if after.endswith("\ufffd") or len(after) <= len(before):
            return ""
        self._context, self._read = self._read, len(self._tokens)
        return self._release(after[len(before) :])

    def flush(self) -> str:
        """What was held back and is now decided, since nothing follows."""
        if self.stopped:
            return ""
        rest = self._decode(self._context, len(self._tokens))[len(self._decode(self._context, self._read)) :]
        text, self._held = self._held + rest, ""
        return text

    def _decode(self, start: int, end: int) -> str:
        return self._tokenizer.decode(self._tokens[start:end], skip_special_tokens=True)

    def _release(self, text: str) -> str:
        text = self._held + text
        found = [at for at in (text.find(stop) for stop in self._stop) if at >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        keep = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that is a start of `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
