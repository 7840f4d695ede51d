"""What a production server's engine can be asked: to serve a version's weights.

Between the follower of the live pointer (service/live), which knows what is to be served, and each engine's own way
to take it. No engine, HTTP or database is known here.
"""

from hashlib import file_digest
from pathlib import Path
from typing import Final, Protocol

from storage.registry import Version

WEIGHTS: Final = "model.safetensors"  # in a checkpoint's folder


class SwapFailed(RuntimeError):
    """The engine does not serve the version.

    The message says why, what the engine does now (it serves the version before, or speculates no more), and what
    to do about it.
    """


class Swapper(Protocol):
    """One engine that can be given another drafter while it serves."""

    def swap(self, version: Version, checkpoint: Path) -> None:
        """Serve `version` from the files in `checkpoint` (adapter/export); returns when the engine serves it.

        Raises `SwapFailed`. To swap to the version that is served already is fine: nothing happens.
        """
        ...


def sha256_of(path: Path) -> str:
    """Of a file's bytes. Raises `OSError` where it cannot be read."""
    with path.open("rb") as data:
        return file_digest(data, "sha256").hexdigest()
