"""A tiny target for the engine's tests."""

from pathlib import Path

import pytest
import torch

from adapter.target import Target, TargetConfig, load
from tests.tiny import tiny_target_dir


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    """A random Llama of three layers, in fp32 on one thread."""
    torch.set_num_threads(1)
    path: Path = tiny_target_dir(tmp_path_factory.mktemp("target"), layers=3)
    return load(TargetConfig(target=str(path), dtype="fp32", device="cpu", cache=path / "cache"))
