"""What benchmarks measure in tests: the tiny target, a drafter of its first layers, and a few prompts."""

import pytest
import torch

from adapter.drafters.causal_lm import CausalLM
from adapter.target import Target
from benchmarks.workload import Workload, workload
from tests.tiny import TEXT

TEXTS = (*TEXT, *(text[::-1] for text in TEXT))


@pytest.fixture
def drafter(target: Target) -> CausalLM:
    """Two of the target's three layers and most of its tokens: right now and then."""
    return CausalLM.from_target(target.model, 2, torch.arange(250))


@pytest.fixture
def prompts(target: Target) -> Workload:
    return workload("tiny", TEXTS, target, 4, 200)
