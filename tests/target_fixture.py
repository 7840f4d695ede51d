"""One tiny target for the whole session: a random Llama of three layers."""

from pathlib import Path

import pytest
import torch

from adapter.target import Target, TargetConfig, load
from tests.tiny import tiny_target_dir


@pytest.fixture(scope="session")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return tiny_target_dir(tmp_path_factory.mktemp("target"), layers=3)


@pytest.fixture(scope="session")
def target(target_dir: Path) -> Target:
    """In fp32 on one thread."""
    return load(TargetConfig(target=str(target_dir), dtype="fp32", device="cpu", cache=target_dir / "cache"))
