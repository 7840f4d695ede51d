"""A tiny target, and greedy traffic of it with teacher rows everywhere."""

from pathlib import Path

import pytest
import torch

from adapter.sample import answers, chat_prompt
from adapter.target import Target, TargetConfig, load
from storage.records import FeedbackRecord
from tests.tiny import TEXT, tiny_target_dir


@pytest.fixture(scope="session")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return tiny_target_dir(tmp_path_factory.mktemp("target"), layers=3)


@pytest.fixture(scope="session")
def target(target_dir: Path) -> Target:
    """A random Llama of three layers, in fp32 on one thread."""
    return load(TargetConfig(target=str(target_dir), dtype="fp32", device="cpu", cache=target_dir / "cache"))


@pytest.fixture(scope="session")
def answered(target: Target) -> list[FeedbackRecord]:
    """The target's greedy answers of up to 24 tokens to 16 prompts."""
    prompts = [chat_prompt(target, f"{text} {n}") for n in range(4) for text in TEXT]
    return list(answers(target, prompts, max_tokens=24, batch=6, top_k=16))
