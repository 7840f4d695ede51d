"""Takes out of an observed answer what its client did not ask for: the client's bytes are those it would have got.

How an answer looks that was not asked for more differs from engine to engine and from version to version: a field is
missing here and null there, a stream ends with a usage chunk or without, the system's fingerprint stands on another
chunk. So it is learnt at the start from two answers to the same question, one plain and one observed (probe).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final, Literal

import msgspec

from service.hosts.sidecar.asking import Wants
from service.hosts.sidecar.dialects import Dialect, Form
from service.hosts.sidecar.excision import Edit, NotPlain, becomes, each, edited, gone, members

LONGEST_EVENT: Final = 4 * 1024 * 1024  # bytes; what has no end by then is passed on as it is
_ENDS: Final = (b"\n\n", b"\r\n\r\n", b"\r\r")
_DATA: Final = b"data:"

Fate = Literal["removed", "null"]
TOP: Final = ("prompt_token_ids", "metrics", "sglext")
CHOICE: Final = ("token_ids", "prompt_token_ids", "logprobs")


@dataclass(frozen=True)
class Bare:
    """How a plain answer of one form differs from an observed one."""

    top: dict[str, Fate] = field(default_factory=dict)
    choice: dict[str, Fate] = field(default_factory=dict)
    ends_with_usage: bool = False  # a plain stream says its usage, asked for it or not
    beside_usage: tuple[str, ...] = ()  # fields of the chunk with the usage, where a client asks for that
    on_last: bytes = (
        b""  # members at the end of a plain stream's chunk with the finish reason, which observed ones lack
    )


def learn(form: Form, plain: Sequence[bytes], observed: Sequence[bytes], usage: Sequence[bytes] = ()) -> Bare:
    """From the JSON texts of two answers to one question: one text, or those of a stream's chunks.

    `usage` are those of a plain stream that was asked for its usage.
    """
    there, here = [_read(text) for text in plain], [_read(text) for text in observed]
    return Bare(
        top=_fates(TOP, there, here),
        choice=_fates(CHOICE, _choices(there), _choices(here)),
        ends_with_usage=any(_is_usage(chunk) for chunk in there),
        beside_usage=_beside_usage([_read(text) for text in usage]),
        on_last=_on_last(plain, observed) if form.stream else b"",
    )


def _read(text: bytes) -> dict[str, Any]:
    try:
        found = msgspec.json.decode(text)
    except msgspec.MsgspecError as error:
        raise NotPlain(str(error)) from error
    if not isinstance(found, dict):
        raise NotPlain("not an object")
    return found


def _choices(chunks: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [choice for chunk in chunks for choice in chunk.get("choices") or () if isinstance(choice, dict)]


def _fates(
    names: Sequence[str], plain: Sequence[dict[str, Any]], observed: Sequence[dict[str, Any]]
) -> dict[str, Fate]:
    """What becomes of those fields that only the observed answer fills."""
    fates: dict[str, Fate] = {}
    for name in names:
        filled = any(part.get(name) is not None for part in observed)
        if filled and not any(part.get(name) is not None for part in plain):
            fates[name] = "null" if any(name in part for part in plain) else "removed"
    return fates


def _beside_usage(chunks: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    return tuple(name for name in TOP if any(_is_usage(chunk) and chunk.get(name) is not None for chunk in chunks))


def _is_usage(chunk: dict[str, Any]) -> bool:
    return chunk.get("choices") == [] and chunk.get("usage") is not None


def _finishes(chunk: dict[str, Any]) -> bool:
    return any(choice.get("finish_reason") is not None for choice in _choices([chunk]))


def _on_last(plain: Sequence[bytes], observed: Sequence[bytes]) -> bytes:
    """The text of the members that the plain chunk with the finish reason has behind those of the observed one."""
    there = next((text for text in plain if _finishes(_read(text))), None)
    here = next((text for text in observed if _finishes(_read(text))), None)
    if there is None or here is None:
        return b""
    known = {member.key for member in members(here)}
    places = members(there)
    behind = [member for member in places if member.key not in known]
    if not behind or [member.key for member in places[-len(behind) :]] != [member.key for member in behind]:
        return b""
    return there[places[-len(behind) - 1].ends : behind[-1].ends]


@dataclass(frozen=True)
class Stripping:
    """Takes the additions out of the answers to one request."""

    wants: Wants
    bare: Bare
    dialect: Dialect

    def text(self, text: bytes, but: Sequence[str] = ()) -> bytes:
        """A whole answer, or a stream's chunk, in which the fields named in `but` stay; raises `NotPlain`."""
        return edited(text, {name: edit for name, edit in self._edits.items() if name not in but})

    def chunk(self, text: bytes) -> bytes | None:
        """A stream's chunk, or None where the client would not have got it; raises `NotPlain`."""
        seen = _read(text)
        if self._is_extra(seen):
            return None
        stripped = self.text(text, self.bare.beside_usage if _is_usage(seen) else ())
        if self.bare.on_last and not self.wants.usage and _finishes(seen):
            end = members(stripped)[-1].ends
            stripped = stripped[:end] + self.bare.on_last + stripped[end:]
        return stripped

    @cached_property
    def _edits(self) -> dict[str, Edit]:
        top = {name: _edit(fate) for name, fate in self.bare.top.items() if not self._asked_for(name)}
        choice = {name: _edit(fate) for name, fate in self.bare.choice.items() if not self._asked_for(name)}
        return {**top, "choices": each(choice)} if choice else top

    def _asked_for(self, name: str) -> bool:
        wants = {"logprobs": self.wants.logprobs, "metrics": self.wants.metrics, "sglext": False}
        return wants.get(name, self.wants.token_ids)

    def _is_extra(self, chunk: dict[str, Any]) -> bool:
        if chunk.get("sglext") is not None and chunk.get("choices") == []:
            return "sglext" in self.bare.top
        if _is_usage(chunk):
            return not self.wants.usage and not self.bare.ends_with_usage
        return (
            bool(self.dialect.fillers) and not self.wants.token_ids and not self.wants.logprobs and self._fills(chunk)
        )

    def _fills(self, chunk: dict[str, Any]) -> bool:
        """Whether the chunk says nothing but the additions: an engine would have kept silent."""
        choices = _choices([chunk])
        return bool(choices) and all(_says_nothing(choice, self.dialect.fillers) for choice in choices)


def _edit(fate: Fate) -> Edit:
    return gone if fate == "removed" else becomes(b"null")


def _says_nothing(choice: dict[str, Any], fillers: str) -> bool:
    if choice.get("finish_reason") is not None:
        return False
    if "delta" in choice:
        delta = choice["delta"]
        return delta == {} or (fillers == "empty" and delta == {"content": ""})
    return fillers == "empty" and choice.get("text") == ""


class Stream:
    """A stream of server-sent events on its way to the client: each event goes on as soon as it is whole."""

    def __init__(self, stripping: Stripping, limit: int) -> None:
        """At most `limit` bytes of the events are kept for reading."""
        self._stripping, self._limit = stripping, limit
        self._open = b""
        self.chunks: list[bytes] = []
        self._kept = 0
        self.faults = 0  # events that were passed on as they came

    @property
    def whole(self) -> bool:
        """Whether nothing is missing from `chunks`."""
        return self._kept <= self._limit

    def feed(self, data: bytes) -> bytes:
        """What of it goes to the client now."""
        self._open += data
        passed = []
        while (end := _end(self._open)) > 0:
            event, self._open = self._open[:end], self._open[end:]
            passed.append(self._event(event))
        if len(self._open) > LONGEST_EVENT:
            passed.append(self.rest())
        return b"".join(passed)

    def rest(self) -> bytes:
        """What is left of an event that does not end."""
        left, self._open = self._open, b""
        return left

    def _event(self, event: bytes) -> bytes:
        body = event.rstrip(b"\r\n")
        if not body.startswith(_DATA) or b"\n" in body:
            return b"" if body.startswith(b"event: sglext_ids") else event
        text = body[len(_DATA) :].lstrip(b" ")
        if not text.startswith(b"{"):
            return event  # [DONE]
        self._keep(text)
        try:
            stripped = self._stripping.chunk(text)
        except NotPlain:
            self.faults += 1
            return event
        if stripped is None:
            return b""
        begins = len(body) - len(text)
        return event[:begins] + stripped + event[len(body) :]

    def _keep(self, text: bytes) -> None:
        self._kept += len(text)
        if self.whole:
            self.chunks.append(text)


def _end(data: bytes) -> int:
    """Where the first whole event ends; -1 where none does."""
    ends = [at + len(mark) for mark in _ENDS if (at := data.find(mark)) >= 0]
    return min(ends, default=-1)


def payloads(stream: bytes) -> list[bytes]:
    """The JSON texts of a whole stream's events."""
    found = []
    for line in stream.splitlines():
        text = line[len(_DATA) :].strip()
        if line.startswith(_DATA) and text.startswith(b"{"):
            found.append(text)
    return found
