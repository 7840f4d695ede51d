"""The weights store: write-once files named by their sha256, in a folder.

Written by the trainer before the SQL row that names the digest; read by servers when they swap. A crash
leaves at most a temporary file or an orphan, which `storage/garbage` finds. Windows of feedback are kept
here too. Layout: `<folder>/sha256/ab/<digest>`, temporary files in `<folder>/tmp`.
"""

import os
import re
import uuid
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

DIGEST = re.compile(r"[0-9a-f]{64}")


class BlobDamaged(RuntimeError):
    """A stored file is missing, or does not hold what its name says."""


@dataclass(frozen=True)
class Blob:
    sha256: str
    size: int  # bytes


class WeightsStore:
    """Content-addressed, write-once storage in a directory (local, or a network file system)."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def put(self, data: bytes) -> Blob:
        """Store `data` durably; a digest that is stored already, whole, is left untouched."""
        blob = Blob(sha256(data).hexdigest(), len(data))
        path = self.path(blob.sha256)
        if self._refresh(path, blob):
            return blob
        temporary = self._write_temporary(data)
        try:
            self._check_written(temporary, blob)
            self._publish(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        return blob

    def get(self, digest: str) -> bytes:
        """The bytes named by `digest`, read (not mapped) and checked; raises `BlobDamaged`."""
        path = self.path(digest)
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            raise BlobDamaged(f"{path} is missing: {_CURE}") from None
        if sha256(data).hexdigest() != digest:
            raise BlobDamaged(f"{path} does not match its sha256 ({len(data)} bytes were read): {_CURE}")
        return data

    def has(self, digest: str) -> bool:
        return self.path(digest).is_file()

    def delete(self, digest: str) -> None:
        """Remove a file; one that is gone already is fine."""
        self.path(digest).unlink(missing_ok=True)

    def digests(self) -> Iterator[str]:
        """The digests of all stored files, in no order."""
        for path in (self.folder / "sha256").glob("??/*"):
            if DIGEST.fullmatch(path.name):
                yield path.name

    def modified(self, digest: str) -> float:
        """When the file was last put, in seconds since the epoch."""
        return self.path(digest).stat().st_mtime

    def temporaries(self) -> Iterator[Path]:
        """Files that a crash during `put` left behind, and those being written now."""
        yield from (self.folder / "tmp").glob("*")

    def path(self, digest: str) -> Path:
        """Where `digest` is kept; paths are made from digests only, so nothing can point outside."""
        if not DIGEST.fullmatch(digest):
            raise ValueError(f"not a sha256 digest: {digest!r}")
        return self.folder / "sha256" / digest[:2] / digest

    def _refresh(self, path: Path, blob: Blob) -> bool:
        """True where the file is there and whole. Its time is renewed: `storage/garbage` spares it."""
        try:
            if sha256(path.read_bytes()).hexdigest() != blob.sha256:
                path.unlink()  # damaged: what it says it is can be written afresh
                return False
            os.utime(path)
        except FileNotFoundError:
            return False
        return True

    def _write_temporary(self, data: bytes) -> Path:
        folder = self.folder / "tmp"
        folder.mkdir(parents=True, exist_ok=True)
        temporary = folder / uuid.uuid4().hex
        try:
            with temporary.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        return temporary

    def _check_written(self, temporary: Path, blob: Blob) -> None:
        written = sha256(temporary.read_bytes()).hexdigest()
        if written != blob.sha256:
            raise BlobDamaged(f"{temporary} was read back as {written}: check the disk under {self.folder}")

    def _publish(self, temporary: Path, path: Path) -> None:
        """Link into place, never over a file that is there, and make the name durable."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):  # another process published the same bytes
            os.link(temporary, path)
        for folder in (path.parent, path.parent.parent):
            _sync(folder)


_CURE = "roll back to a version that is whole (`redraft rollback`), or restore the file from a backup"


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
