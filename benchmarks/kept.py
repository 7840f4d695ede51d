"""What costs a benchmark minutes and never changes: made once, kept as a file that is named by all it depends on."""

import json
import os
from collections.abc import Callable
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")


def kept(folder: Path, kind: str, key: Any, shape: type[T], make: Callable[[], T]) -> T:
    """What was kept under `kind` and `key`, or what `make` makes now, which is kept.

    `key` is anything that JSON can hold. A file that is no `shape` any more is made again.
    """
    path = folder / f"{kind}-{sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]}.msgpack"
    with suppress(OSError, msgspec.DecodeError):
        return msgspec.msgpack.decode(path.read_bytes(), type=shape)
    made = make()
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{os.getpid()}")  # whole or not at all: two may run at once
    try:
        draft.write_bytes(msgspec.msgpack.encode(made))
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)
    return made
