"""Which headers go through a reverse proxy, and which are of one connection only (RFC 9110, 7.6.1)."""

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from service.hosts.sidecar.recording import Sender
from storage.validation import LABEL

Headers = list[tuple[bytes, bytes]]

HOP_BY_HOP: Final = frozenset(
    {
        b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te",
        b"trailer", b"transfer-encoding", b"upgrade",
    }
)  # fmt: skip
_OURS: Final = frozenset({b"host", b"expect"})  # the first is the engine's own; uvicorn answers the second
_VIA: Final = b"1.1 redraft"


def end_to_end(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    """Without those of one connection, the ones that `Connection` names among them."""
    given = list(headers)
    named = {name.strip().lower() for key, value in given if key.lower() == b"connection" for name in value.split(b",")}
    return [(key, value) for key, value in given if key.lower() not in HOP_BY_HOP | named]


def to_engine(scope: Mapping[str, Any], host: bytes) -> Headers:
    """The client's headers as the engine gets them, with whose request it is."""
    headers = [(key, value) for key, value in end_to_end(scope["headers"]) if key not in _OURS]
    client = scope.get("client")
    said = _joined(scope["headers"], b"x-forwarded-for")
    peer = [client[0].encode()] if client else []
    headers = [(key, value) for key, value in headers if key not in (b"x-forwarded-for", b"via")]
    headers += [(b"x-forwarded-for", b", ".join(said + peer))] if said + peer else []
    headers.append((b"via", b", ".join([*_joined(scope["headers"], b"via"), _VIA])))
    return [(b"host", host), *headers]


def _joined(headers: Iterable[tuple[bytes, bytes]], name: bytes) -> list[bytes]:
    return [value for key, value in headers if key == name]


def without(headers: Headers, *names: bytes) -> Headers:
    return [(key, value) for key, value in headers if key.lower() not in names]


def value_of(headers: Iterable[tuple[bytes, bytes]], name: bytes) -> bytes:
    """The header's value; empty where there is none."""
    return next((value for key, value in headers if key.lower() == name), b"")


def sender_of(headers: Iterable[tuple[bytes, bytes]]) -> Sender | None:
    """The X-Redraft-* headers; None where they are not as the reference server takes them.

    That server refuses such a request. Here it is another one's, and passes; it is only not observed.
    """
    labels = {}
    given = list(headers)
    for name in ("workload", "tenant"):
        label = value_of(given, f"x-redraft-{name}".encode()).decode("latin-1") or "default"
        if not re.fullmatch(LABEL, label) or not any(map(str.isalnum, label)):
            return None
        labels[name] = label
    train = value_of(given, b"x-redraft-train") or b"yes"
    return Sender(**labels, train=train == b"yes") if train in (b"yes", b"no") else None
