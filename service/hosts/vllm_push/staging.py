"""Checkpoint files that an engine is given: copies of our own, so that the version before is there to go back to."""

import os
from pathlib import Path

from service.hosts.swapping import WEIGHTS, sha256_of
from storage.pushes import Weights


class NotStaged(RuntimeError):
    """There is no such file, or it cannot be copied."""


class Staging:
    """One folder an engine, `<sha256>.safetensors` in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def stage(self, checkpoint: Path, label: str, version_id: int | None) -> Weights:
        """Copy the checkpoint's weights, durably; raises `NotStaged`."""
        source = checkpoint / WEIGHTS if checkpoint.is_dir() else checkpoint
        try:
            digest = sha256_of(source)
            path = self.folder / f"{digest}.safetensors"
            if not (path.is_file() and sha256_of(path) == digest):
                self._copy(source, path, digest)
        except OSError as error:
            raise NotStaged(f"{source} cannot be copied to {self.folder} ({error.strerror})") from error
        return Weights(label, str(path.absolute()), digest, version_id)

    def keep(self, *used: Weights | None) -> None:
        """Delete all but these."""
        names = {Path(weights.checkpoint).name for weights in used if weights is not None}
        for path in self.folder.glob("*.safetensors*"):
            if path.name not in names:
                path.unlink(missing_ok=True)

    def _copy(self, source: Path, path: Path, digest: str) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".safetensors.tmp")
        with source.open("rb") as read, temporary.open("wb") as written:
            while data := read.read(1 << 22):
                written.write(data)
            written.flush()
            os.fsync(written.fileno())
        if sha256_of(temporary) != digest:
            raise NotStaged(f"{source} changed while it was copied, or the disk is damaged")
        os.replace(temporary, path)
