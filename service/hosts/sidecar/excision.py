"""Cuts members out of JSON text and leaves every other byte as it stood.

An observed answer is to be what the client would have got. To parse it and to write it again would change spaces,
escapes and the spelling of numbers; so the text is only measured (msgspec does that at C speed) and cut.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import msgspec

_KEY: Final = re.compile(rb'[\s,]*("(?:[^"\\]|\\.)*")\s*:\s*')
_START: Final = re.compile(rb"\s*[\[{]")
_BETWEEN: Final = re.compile(rb"[\s,]*")
_members = msgspec.json.Decoder(dict[str, msgspec.Raw])
_elements = msgspec.json.Decoder(list[msgspec.Raw])
_key = msgspec.json.Decoder(str)

Edit = Callable[[bytes], bytes | None]  # a value's text to its new text; None: the member goes


class NotPlain(ValueError):
    """Not an object, or one whose members cannot be told apart, such as one that has a key twice."""


@dataclass(frozen=True)
class Member:
    """Where a member of an object stands in its text."""

    key: str
    begins: int  # of the key
    value: int
    ends: int


def members(text: bytes) -> list[Member]:
    """The members of an object in their order; raises `NotPlain`."""
    try:
        found = _members.decode(text)
        start = _START.match(text)
        assert start is not None, "an object was decoded"
        at, places = start.end(), []
        for key, raw in found.items():
            spelt = _KEY.match(text, at)
            if spelt is None or _key.decode(spelt[1]) != key:
                raise NotPlain("a key stands twice")
            at = spelt.end() + len(bytes(raw))
            places.append(Member(key, spelt.start(1), spelt.end(), at))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise NotPlain(str(error)) from error
    if text[at:].strip() != b"}":
        raise NotPlain("a key stands twice")
    return places


def elements(text: bytes) -> list[tuple[int, int]]:
    """Where the elements of an array begin and end; raises `NotPlain`."""
    try:
        found = _elements.decode(text)
        start = _START.match(text)
        assert start is not None, "an array was decoded"
        at, places = start.end(), []
        for raw in found:
            gap = _BETWEEN.match(text, at)
            assert gap is not None, "it matches nothing, too"
            at = gap.end() + len(bytes(raw))
            places.append((gap.end(), at))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise NotPlain(str(error)) from error
    return places


def edited(text: bytes, edits: Mapping[str, Edit]) -> bytes:
    """The object with some of its values rewritten or gone; all others, and everything between them, stay."""
    places = members(text)
    if not edits.keys() & {member.key for member in places}:
        return text
    pieces, end = [text[: places[0].begins]], 0
    for member in places:
        value = text[member.value : member.ends]
        new = edits[member.key](value) if member.key in edits else value
        if new is not None:
            between = text[end : member.begins] if len(pieces) > 1 else b""
            pieces.append(between + text[member.begins : member.value] + new)
        end = member.ends
    return b"".join([*pieces, text[end:]])


def each(edits: Mapping[str, Edit]) -> Edit:
    """Those edits on every object of an array."""

    def apply(text: bytes) -> bytes:
        if text == b"null":
            return text
        pieces, kept = [], 0
        for begins, ends in elements(text):
            pieces += [text[kept:begins], edited(text[begins:ends], edits)]
            kept = ends
        return b"".join([*pieces, text[kept:]])

    return apply


def gone(text: bytes) -> bytes | None:
    return None


def becomes(new: bytes) -> Edit:
    return lambda text: new


def with_member(text: bytes, key: str, value: bytes) -> bytes:
    """The object with that member: in the place of its old value, or at the end."""
    places = members(text)
    for member in places:
        if member.key == key:
            return text[: member.value] + value + text[member.ends :]
    end = text.rindex(b"}")
    return text[:end] + (b"," if places else b"") + msgspec.json.encode(key) + b":" + value + text[end:]
