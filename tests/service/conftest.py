"""A tiny target with a one-layer drafter, decoding, for the tests of the HTTP side."""

from collections.abc import Iterator

import pytest
import torch
from openai import OpenAI

from adapter.target import Target, TargetConfig, load
from service.engine.engine import Engine, EngineConfig
from service.engine.generation import Generation
from tests.service.asking import openai_app
from tests.service.engine.oracle import UNGOVERNED, first_layers
from tests.service.serving import running
from tests.tiny import tiny_target_dir

VERSION = 7
# An audit decodes beside other requests: their log-probabilities may then be rounded otherwise.
CONFIG = EngineConfig(draft_length=3, slots=4, context=256, waiting=8, teacher_top_k=8, audit_share=0.0)


@pytest.fixture(scope="module")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    torch.set_num_threads(1)
    path = tiny_target_dir(tmp_path_factory.mktemp("target"), layers=2)
    return load(TargetConfig(target=str(path), dtype="fp32", device="cpu", cache=path / "cache"))


@pytest.fixture(scope="module")
def finished() -> list[Generation]:
    """What the engine said was finished, in order."""
    return []


@pytest.fixture(scope="module")
def decoder(tiny_target: Target, finished: list[Generation]) -> Iterator[Engine]:
    """A running engine whose drafter is version 7."""
    engine = Engine(tiny_target, CONFIG, finished.append, UNGOVERNED)
    engine.start()
    engine.swap(VERSION, first_layers(tiny_target)).result(timeout=20)
    yield engine
    engine.stop()


@pytest.fixture(scope="module")
def openai_address(tiny_target: Target, decoder: Engine) -> Iterator[str]:
    """OpenAI's API over that engine, on a socket."""
    with running(openai_app(tiny_target, decoder)) as address:
        yield address


@pytest.fixture(scope="module")
def client(openai_address: str) -> Iterator[OpenAI]:
    """The official client of it; it tries once."""
    with OpenAI(base_url=f"{openai_address}/v1", api_key="unused", max_retries=0, timeout=60) as client:
        yield client
