"""What a target is, as two fingerprints: of its weights and of its tokenizer.

Feedback, drafters and versions carry them, so that nothing learnt from one target is used on another.
Hashing gigabytes takes time: the result is kept in `redraft.json` beside the weights, or in the cache folder
where that directory cannot be written, and is computed again when the files' sizes or times have changed.
"""

import json
import os
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

KEPT_IN = "redraft.json"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt")


class TargetNotFound(ValueError):
    """There is no usable target where the settings point; the message says what to do."""


@dataclass(frozen=True)
class TargetFiles:
    """A target on disk in transformers' form."""

    name: str
    path: Path
    fingerprint: str  # sha256 over the weights
    tokenizer_fingerprint: str  # sha256 over the tokenizer's vocabulary and merges


def identify(name: str, path: Path, cache: Path) -> TargetFiles:
    """Fingerprints of the directory `path`, read where they were kept, or computed and kept."""
    state = _state(path)
    key = sha256(str(path.resolve()).encode()).hexdigest()
    beside, aside = path / KEPT_IN, cache / "fingerprints" / f"{key}.json"
    for place in (beside, aside):
        kept = _read(place)
        if kept.get("state") == state:
            return TargetFiles(name, path, kept["fingerprint"], kept["tokenizer_fingerprint"])
    files = TargetFiles(name, path, weights_fingerprint(path), tokenizer_fingerprint(path))
    try:
        _keep(files, state, beside)
    except OSError:  # somebody else's directory
        _keep(files, state, aside)
    return files


def weights_fingerprint(path: Path) -> str:
    """sha256 over the names and contents of the safetensors files."""
    return _digest(_weights(path))


def tokenizer_fingerprint(path: Path) -> str:
    """sha256 over what maps text to ids; the chat template does not count, it changes no token's meaning."""
    files = [path / name for name in TOKENIZER_FILES if (path / name).is_file()]
    if not files:
        raise TargetNotFound(f"no tokenizer in {path}: save one there with tokenizer.save_pretrained")
    return _digest(files[:1] if files[0].name == "tokenizer.json" else files)


def _weights(path: Path) -> list[Path]:
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise TargetNotFound(f"no safetensors weights in {path}: save the model there with save_pretrained")
    return files


def _digest(files: list[Path]) -> str:
    total = sha256()
    for file in files:
        total.update(f"{file.name}\0{file.stat().st_size}\0".encode())
        with file.open("rb") as data:
            while block := data.read(1 << 22):
                total.update(block)
    return total.hexdigest()


def _state(path: Path) -> list[list[str | int]]:
    """Names, sizes and times of the files that the fingerprints cover."""
    covered = _weights(path) + [path / name for name in TOKENIZER_FILES if (path / name).is_file()]
    return [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in covered]


def _read(place: Path) -> dict[str, Any]:
    try:
        kept = json.loads(place.read_text())
    except (OSError, ValueError):
        return {}
    return kept if isinstance(kept, dict) else {}


def _keep(files: TargetFiles, state: list[list[str | int]], place: Path) -> None:
    """Write whole or not at all: two processes may find the same target at once."""
    place.parent.mkdir(parents=True, exist_ok=True)
    draft = place.with_name(f"{place.name}.{os.getpid()}")
    prints = {"fingerprint": files.fingerprint, "tokenizer_fingerprint": files.tokenizer_fingerprint}
    try:
        draft.write_text(json.dumps({"state": state, **prints}))
        os.replace(draft, place)
    finally:
        draft.unlink(missing_ok=True)
