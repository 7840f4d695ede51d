"""Greedy traffic of the tiny target, with teacher rows everywhere."""

import pytest

from adapter.sample import answers, chat_prompt
from adapter.target import Target
from storage.records import FeedbackRecord
from tests.tiny import TEXT


@pytest.fixture(scope="session")
def answered(target: Target) -> list[FeedbackRecord]:
    """The target's greedy answers of up to 24 tokens to 16 prompts."""
    prompts = [chat_prompt(target, f"{text} {n}") for n in range(4) for text in TEXT]
    return list(answers(target, prompts, max_tokens=24, batch=6, top_k=16))
