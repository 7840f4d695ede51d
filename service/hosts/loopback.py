"""Engines that weights are pushed to: on this machine only, as whoever reaches their control routes can change both
models."""

import ipaddress
from urllib.parse import urlsplit


class EngineTrouble(RuntimeError):
    """The engine cannot be reached, or refused what it was asked; the message says which."""


class NotLoopback(ValueError):
    """The engine's control routes are, or would be, open to other machines."""


def loopback(url: str) -> tuple[str, int]:
    """Host and port of an engine on this machine, one spelling for each; raises `NotLoopback`."""
    parts = urlsplit(url)
    host = "127.0.0.1" if parts.hostname == "localhost" else parts.hostname or ""
    if parts.scheme != "http" or not is_loopback(host):
        raise NotLoopback(
            f"{url} is not on loopback: weights are pushed to an engine on this machine only, as who can reach its "
            f"control routes can change every weight (http://127.0.0.1:PORT)"
        )
    return f"[{host}]" if ":" in host else host, parts.port or 80


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
