"""`redraft export`: a version as files for other engines."""

import json
from pathlib import Path

import pytest
import torch
from gguf import GGUFReader
from transformers import AutoModelForCausalLM

from adapter.drafters.causal_lm import CausalLM
from adapter.target import Target, load_embedding
from adapter.versions import Versions
from storage.registry import Registry
from storage.weights import WeightsStore
from tests.cli.conftest import Run


@pytest.fixture(autouse=True)
def drafter(
    home: Path,
    target: Target,
    target_dir: Path,
    registry: Registry,
    store: WeightsStore,
    monkeypatch: pytest.MonkeyPatch,
) -> CausalLM:
    """Version 1 of drafter `chat`, of the tiny target that the settings name."""
    monkeypatch.setenv("REDRAFT_TARGET", str(target_dir))
    monkeypatch.setenv("REDRAFT_CACHE", str(target_dir / "cache"))
    made = CausalLM.from_target(target.model, 1, torch.arange(0, 300, 3))
    blob = Versions(store, target.files, load_embedding(target.files)).save(made)
    files, config = target.files, made.config.to_dict()
    registry.create_drafter(
        "chat", "causal_lm", files.fingerprint, files.tokenizer_fingerprint, config, blob.sha256, blob.size, "tester"
    )
    return made


def test_a_version_becomes_a_checkpoint_that_transformers_loads(
    redraft: Run, drafter: CausalLM, tmp_path: Path
) -> None:
    result = redraft("export", "1", "--to", str(tmp_path / "out"))
    assert result.exit_code == 0
    assert str(tmp_path / "out" / "chat-1") in result.stdout
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "chat-1")
    tokens = torch.tensor([[5, 9, 200]])
    with torch.no_grad():
        own = drafter.logits(drafter.hidden(tokens))
        assert torch.equal(model(tokens).logits.argmax(-1), drafter.draft_to_target[own.argmax(-1)])


def test_the_dtype_can_be_chosen(redraft: Run, tmp_path: Path) -> None:
    redraft("export", "1", "--to", str(tmp_path), "--dtype", "bf16")
    assert json.loads((tmp_path / "chat-1" / "config.json").read_text())["dtype"] == "bfloat16"


def test_a_version_and_its_target_become_gguf_files(redraft: Run, tmp_path: Path) -> None:
    result = redraft("export", "1", "--format", "gguf", "--to", str(tmp_path), "--with-target")
    assert result.exit_code == 0, result.stderr
    names = [{tensor.name for tensor in GGUFReader(tmp_path / name).tensors} for name in ("chat-1.gguf", "target.gguf")]
    assert "output.weight" in names[0]
    assert "output.weight" not in names[1]
    again = redraft("export", "1", "--format", "gguf", "--to", str(tmp_path / "b"), "--like", f"{tmp_path}/target.gguf")
    assert again.exit_code == 0, again.stderr


def test_what_is_there_is_not_written_over(redraft: Run, tmp_path: Path) -> None:
    assert [redraft("export", "1", "--to", str(tmp_path)).exit_code for _ in range(2)] == [0, 1]
    assert "is there already" in redraft("export", "1", "--to", str(tmp_path)).stderr


def test_options_of_the_other_format_are_refused(redraft: Run, tmp_path: Path) -> None:
    assert "for --format gguf" in redraft("export", "1", "--to", str(tmp_path), "--with-target").stderr


def test_a_kind_that_no_engine_loads_is_refused_with_the_reason(
    redraft: Run, registry: Registry, target: Target, tmp_path: Path
) -> None:
    files = target.files
    registry.create_drafter(
        "heads", "medusa", files.fingerprint, files.tokenizer_fingerprint, {}, "0" * 64, 1, "tester"
    )
    result = redraft("export", "1", "--drafter", "heads", "--to", str(tmp_path))
    assert result.exit_code == 1
    assert "of kind medusa, which only redraft's own engine serves" in result.stderr
