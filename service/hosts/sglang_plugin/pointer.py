"""The files through which a push and SGLang's processes speak: which weights to load, and what came of it.

SGLang hands a custom loader nothing but tensors, as a pickle. So the push sends none: it writes here what is to be
loaded, and each rank answers beside it. Both sides find the file by REDRAFT_SGLANG_POINTER.
"""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from storage.config import setting


@dataclass(frozen=True)
class PointerConfig:
    """Where the pointer is; the same for SGLang and for what pushes to it."""

    sglang_pointer: Path = setting(
        Path("~/.cache/redraft/sglang/pointer.json"),
        "file that tells SGLang which drafter to load; the same for SGLang and the sidecar",
    )


@dataclass(frozen=True)
class Wanted:
    """What a push asks for."""

    push: str  # one push's own name: answers to another one count for nothing
    drafter: str
    version: int
    path: str
    sha256: str  # of the safetensors file


@dataclass(frozen=True)
class Answer:
    """What one rank made of it."""

    push: str
    loaded: bool
    untouched: bool  # nothing of the model was written, where it is not loaded
    error: str


def write_wanted(pointer: Path, wanted: Wanted) -> None:
    """Whole or not at all; answers to what was asked before are taken away."""
    pointer.parent.mkdir(parents=True, exist_ok=True)
    for old in pointer.parent.glob(f"{pointer.stem}.rank*.json"):
        old.unlink(missing_ok=True)
    _put(pointer, json.dumps(asdict(wanted)))


def read_wanted(pointer: Path) -> Wanted:
    """Raises `OSError` or `ValueError` where there is none."""
    return Wanted(**json.loads(pointer.read_text()))


def write_answer(pointer: Path, rank: int, answer: Answer) -> None:
    _put(pointer.with_name(f"{pointer.stem}.rank{rank}.json"), json.dumps(asdict(answer)))


def read_answers(pointer: Path, push: str) -> list[Answer]:
    """What the ranks made of this push."""
    found = [Answer(**json.loads(path.read_text())) for path in pointer.parent.glob(f"{pointer.stem}.rank*.json")]
    return [answer for answer in found if answer.push == push]


def _put(path: Path, text: str) -> None:
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    draft.write_text(text)
    os.replace(draft, path)
