"""The target's log-probabilities in OpenAI's two wire formats. One entry a token, the end of text included (as vLLM).

Tokens are bytes first: one that is a part of a character has no text of its own, and is written as OpenAI does,
`\\xf0\\x9f` in a chat and `bytes:\\xf0\\x9f` in a completion. Who asks for it gets `token_id:123` for
each, as from vLLM.
"""

import codecs
from collections.abc import Sequence
from typing import Any

from adapter.spelling import Spelling
from service.engine.generation import TokenLogprobs

Json = dict[str, Any]
LEAST = -9999.0  # what OpenAI writes for a token that is as good as impossible; JSON has no -inf


def chat_logprobs(spelling: Spelling, entries: Sequence[TokenLogprobs], by_id: bool = False) -> Json:
    """`choices[].logprobs` of a chat."""
    content = [
        _candidate(spelling, entry.token, entry.logprob, by_id)
        | {"top_logprobs": [_candidate(spelling, token, logprob, by_id) for token, logprob in entry.top]}
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def _candidate(spelling: Spelling, token: int, logprob: float, by_id: bool) -> Json:
    known = spelling.token_bytes(token)
    text = _text(spelling, token, "", by_id)
    return {"token": text, "logprob": max(logprob, LEAST), "bytes": None if known is None else list(known)}


class CompletionLogprobs:
    """`choices[].logprobs` of a completion, piece by piece: offsets count on through the pieces of a stream."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def piece(self, spelling: Spelling, entries: Sequence[TokenLogprobs], by_id: bool = False) -> Json:
        """The next tokens'."""
        return {
            "tokens": [_text(spelling, entry.token, "bytes:", by_id) for entry in entries],
            "token_logprobs": [max(entry.logprob, LEAST) for entry in entries],
            "top_logprobs": [_top(spelling, entry, by_id) for entry in entries],
            "text_offset": [self._advance(spelling, entry.token) for entry in entries],
        }

    def _advance(self, spelling: Spelling, token: int) -> int:
        """Where in the text a token begins, in characters: after those that are whole."""
        begins = self._offset
        if not spelling.is_special(token):
            self._offset += len(self._decoder.decode(spelling.token_bytes(token) or b""))
        return begins


def _top(spelling: Spelling, entry: TokenLogprobs, by_id: bool) -> dict[str, float]:
    """The likeliest tokens, and the one that was chosen, as at OpenAI."""
    found: dict[str, float] = {}
    for token, logprob in (*entry.top, (entry.token, entry.logprob)):
        found.setdefault(_text(spelling, token, "bytes:", by_id), max(logprob, LEAST))
    return found


def _text(spelling: Spelling, token: int, prefix: str, by_id: bool) -> str:
    """A token as text, `prefix` before bytes that are none; or its id."""
    known = None if by_id else spelling.token_bytes(token)
    if known is None:
        return f"token_id:{token}"  # as vLLM writes it
    try:
        return known.decode()
    except UnicodeDecodeError:
        return prefix + "".join(f"\\x{byte:02x}" for byte in known)
