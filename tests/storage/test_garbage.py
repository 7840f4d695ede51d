"""Garbage: only what is old and named by no row is deleted."""

import os
import time
from pathlib import Path

import pytest
from sqlalchemy import Engine

from storage import garbage
from storage.registry import Registry
from storage.weights import WeightsStore
from storage.windows import Windows
from tests.storage.rows import make_drafter, make_record


@pytest.fixture
def store(tmp_path: Path) -> WeightsStore:
    return WeightsStore(tmp_path / "weights")


def test_an_old_file_that_no_row_names_is_deleted(engine: Engine, store: WeightsStore) -> None:
    orphan = _age(store, store.put(b"orphan").sha256)
    assert garbage.orphans(engine, store, 24) == [orphan]
    assert garbage.collect(engine, store, 24) == 1
    assert not store.has(orphan)


def test_weights_of_versions_and_windows_are_kept_however_old(engine: Engine, store: WeightsStore) -> None:
    registry = Registry(engine)
    weights = _age(store, store.put(b"version 1").sha256)
    registry.create_drafter("chat", "causal_lm", "t", "t", {}, weights, 9, "test")
    window = Windows(engine, store).keep("chat", (make_record("a"),), ())
    assert window is not None
    _age(store, window.sha256)
    assert garbage.collect(engine, store, 24) == 0


def test_a_file_put_again_counts_as_new(engine: Engine, store: WeightsStore) -> None:
    digest = _age(store, store.put(b"weights").sha256)
    store.put(b"weights")
    make_drafter(Registry(engine))
    assert garbage.collect(engine, store, 24) == 0
    assert store.has(digest)


def test_temporary_files_of_a_crash_are_deleted_when_old(engine: Engine, store: WeightsStore) -> None:
    store.put(b"something")
    old, new = store.folder / "tmp" / "old", store.folder / "tmp" / "new"
    for path in (old, new):
        path.write_bytes(b"half")
    os.utime(old, (0, 0))
    assert garbage.collect(engine, store, 24) == 1
    assert not old.exists()
    assert new.exists()


def _age(store: WeightsStore, digest: str) -> str:
    two_days_ago = time.time() - 48 * 3600
    os.utime(store.path(digest), (two_days_ago, two_days_ago))
    return digest
