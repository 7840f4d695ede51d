"""Versions as files: written once, found again, and the last few kept."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gguf import GGUFReader

from adapter.drafters.causal_lm import CausalLM
from adapter.target import Target, load_embedding
from adapter.versions import Versions
from service.hosts import exporting
from service.hosts.exporting import KEPT, Exports
from storage.registry import Drafter, Registry, Version
from storage.weights import WeightsStore


@pytest.fixture
def versions(target: Target, tmp_path: Path) -> Versions:
    return Versions(WeightsStore(tmp_path / "weights"), target.files, load_embedding(target.files))


@pytest.fixture
def registered(target: Target, versions: Versions, sqlite_template: Path, tmp_path: Path) -> tuple[Drafter, Version]:
    """Version 1 of a drafter."""
    from storage.database import open_database

    path = tmp_path / "redraft.db"
    path.write_bytes(sqlite_template.read_bytes())
    registry, files = Registry(open_database(f"sqlite:///{path}")), target.files
    made = CausalLM.from_target(target.model, 1, torch.arange(0, 300, 3))
    blob = versions.save(made)
    registry.create_drafter(
        "chat", "causal_lm", files.fingerprint, files.tokenizer_fingerprint, made.config.to_dict(), blob.sha256,
        blob.size, "tester",
    )  # fmt: skip
    return registry.drafter("chat"), registry.live("chat")


def test_a_version_is_written_once_and_found_again(
    versions: Versions, registered: tuple[Drafter, Version], tmp_path: Path
) -> None:
    drafter, version = registered
    exports = Exports(versions, drafter, tmp_path / "out", exporting.checkpoint)
    path = exports.load(version)
    assert path.name == f"1-{version.weights_sha256[:12]}"
    written = (path / "model.safetensors").stat().st_mtime_ns
    assert exports.load(version) == path
    assert (path / "model.safetensors").stat().st_mtime_ns == written


def test_gguf_files_are_written_for_llamacpp(
    versions: Versions, registered: tuple[Drafter, Version], tmp_path: Path
) -> None:
    drafter, version = registered
    path = Exports(versions, drafter, tmp_path / "out", exporting.gguf(), ".gguf").load(version)
    assert path.suffix == ".gguf"
    assert "token_embd.weight" in {tensor.name for tensor in GGUFReader(path).tensors}


def test_the_last_few_are_kept_and_other_drafters_left_alone(
    registered: tuple[Drafter, Version], tmp_path: Path
) -> None:
    drafter, version = registered
    folder = tmp_path / "out"
    (folder / "17" / "1-abc").mkdir(parents=True)

    def write(versions: object, drafter: Drafter, version: Version, path: Path) -> None:
        path.mkdir()

    exports = Exports(None, drafter, folder, write)  # type: ignore[arg-type]
    for number in range(1, KEPT + 3):
        path = exports.load(replace(version, number=number))
        os.utime(path, (number, number))
    exports.load(replace(version, number=KEPT + 1))
    kept = sorted(int(path.name.split("-")[0]) for path in (folder / str(drafter.id)).iterdir())
    assert len(kept) == KEPT
    assert kept[-2:] == [KEPT + 1, KEPT + 2]
    assert (folder / "17" / "1-abc").exists()
