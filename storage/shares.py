"""A request's place between 0 and 1: by it requests are shared out between versions, the same on every server."""

from hashlib import blake2b


def share_of(request_id: str) -> float:
    """By the hash of the id, so the same everywhere and independent of what the request holds."""
    return int.from_bytes(blake2b(request_id.encode(), digest_size=8).digest()) / 2**64
