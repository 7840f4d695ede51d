"""The weights store: write-once, verified, and whole after a crash at any step."""

import os
from collections.abc import Callable
from hashlib import sha256
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from storage.weights import BlobDamaged, WeightsStore

DATA = bytes(range(256)) * 50
DIGEST = sha256(DATA).hexdigest()


class Crash(BaseException):
    """The process ends here: not an Exception, so that no handler takes it for a failure to report."""


@pytest.fixture
def store(tmp_path: Path) -> WeightsStore:
    return WeightsStore(tmp_path / "weights")


def test_what_was_put_is_read_back(store: WeightsStore) -> None:
    blob = store.put(DATA)
    assert (blob.sha256, blob.size) == (DIGEST, len(DATA))
    assert store.get(DIGEST) == DATA
    assert list(store.digests()) == [DIGEST]


def test_putting_the_same_bytes_again_leaves_the_file_untouched(store: WeightsStore) -> None:
    store.put(DATA)
    inode = store.path(DIGEST).stat().st_ino
    store.put(DATA)
    assert store.path(DIGEST).stat().st_ino == inode


@pytest.mark.parametrize(("step", "call"), [("fsync", 1), ("link", 1), ("fsync", 2), ("fsync", 3)])
def test_a_crash_at_any_step_leaves_no_file_that_is_not_whole(
    store: WeightsStore, monkeypatch: pytest.MonkeyPatch, step: str, call: int
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, step, _crash_at(call, getattr(os, step)))
        patch.setattr(Path, "unlink", _crash_at(1, Path.unlink))  # a process that is gone tidies nothing up
        with pytest.raises(Crash):
            store.put(DATA)
    assert all(store.get(digest) == DATA for digest in store.digests())
    assert len(list(store.temporaries())) == 1
    store.put(DATA)
    assert store.get(DIGEST) == DATA


def test_a_full_disk_leaves_nothing_behind(store: WeightsStore, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", _raise(OSError(28, "No space left on device")))
        with pytest.raises(OSError, match="No space left"):
            store.put(DATA)
    assert list(store.digests()) == []
    assert list(store.temporaries()) == []


def test_a_flipped_bit_is_noticed_and_the_message_says_what_to_do(store: WeightsStore) -> None:
    store.put(DATA)
    damaged = bytearray(DATA)
    damaged[1000] ^= 1
    store.path(DIGEST).write_bytes(bytes(damaged))
    with pytest.raises(BlobDamaged, match=r"does not match its sha256.*redraft rollback"):
        store.get(DIGEST)


def test_a_truncated_file_is_noticed(store: WeightsStore) -> None:
    store.put(DATA)
    os.truncate(store.path(DIGEST), 100)
    with pytest.raises(BlobDamaged, match="100 bytes"):
        store.get(DIGEST)


def test_putting_the_bytes_of_a_damaged_file_mends_it(store: WeightsStore) -> None:
    store.put(DATA)
    os.truncate(store.path(DIGEST), 100)
    store.put(DATA)
    assert store.get(DIGEST) == DATA


def test_a_missing_file_is_named(store: WeightsStore) -> None:
    with pytest.raises(BlobDamaged, match=f"{DIGEST} is missing"):
        store.get(DIGEST)


@pytest.mark.parametrize("name", ["../../etc/passwd", "", "AB" * 32, DIGEST + "0", f"{DIGEST[:63]}\n"])
def test_what_is_not_a_digest_names_no_path(store: WeightsStore, name: str) -> None:
    with pytest.raises(ValueError, match="not a sha256 digest"):
        store.get(name)


def test_deleting_twice_is_fine(store: WeightsStore) -> None:
    store.put(DATA)
    store.delete(DIGEST)
    store.delete(DIGEST)
    assert not store.has(DIGEST)


def _crash_at(call: int, real: Callable[..., Any]) -> Callable[..., Any]:
    """`real`, until its call number `call`."""
    calls = count(1)

    def step(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == call:
            raise Crash
        return real(*args, **kwargs)

    return step


def _raise(error: Exception) -> Callable[..., None]:
    def fail(*args: Any) -> None:
        raise error

    return fail
