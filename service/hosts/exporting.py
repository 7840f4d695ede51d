"""Versions as files that a production engine loads: what a follower of the live pointer hands to a `Swapper`.

Each is written once, under a name that its weights decide, and the last few are kept, so that a rollback finds its
files there. A folder or file appears under its name only when whole.
"""

import shutil
from collections.abc import Callable
from pathlib import Path

import structlog

from adapter.versions import Versions
from storage.registry import Drafter, Version

KEPT = 4  # the live one, the one before, a canary, and the one being written

Write = Callable[[Versions, Drafter, Version, Path], None]

log = structlog.get_logger()


class Exports:
    """One drafter's versions, each a folder or a file under `folder`; `load` is what a `LiveFollower` asks for."""

    def __init__(self, versions: Versions, drafter: Drafter, folder: Path, write: Write, ending: str = "") -> None:
        self._versions, self._drafter = versions, drafter
        self._folder = folder / str(drafter.id)  # its own: a name may be the beginning of another one
        self._write, self._ending = write, ending

    def load(self, version: Version) -> Path:
        """Where the version's files are; they are written first where they are missing. Raises as `write` does."""
        path = self._folder / f"{version.number}-{version.weights_sha256[:12]}{self._ending}"
        if not path.exists():
            self._folder.mkdir(parents=True, exist_ok=True)
            self._write(self._versions, self._drafter, version, path)
            log.info("export.written", version=version.number, path=str(path))
        path.touch()
        self._forget()
        return path

    def _forget(self) -> None:
        """All but the last few that were asked for go."""
        written = sorted(self._folder.glob(f"[0-9]*{self._ending}"), key=lambda path: path.stat().st_mtime)
        for old in written[:-KEPT]:
            shutil.rmtree(old) if old.is_dir() else old.unlink()


def checkpoint(versions: Versions, drafter: Drafter, version: Version, path: Path) -> None:
    """A Hugging Face folder, in the dtype of the target's files."""
    from adapter.export import hf

    hf.write(versions.load(version, drafter), versions.files, path)


def gguf(like: Path | None = None) -> Write:
    """A GGUF file with the tokenizer of the GGUF file `like`, which llama.cpp serves as the target."""

    def write(versions: Versions, drafter: Drafter, version: Version, path: Path) -> None:
        from adapter.export import gguf as form

        form.write(versions.load(version, drafter), versions.files, path, like=like)

    return write
