"""Memory for keys and values is bounded by refusing."""

from typing import Any

import pytest

from adapter.target import Target
from service.engine.engine import Engine, EngineConfig
from service.engine.generation import Generation
from service.engine.memory import GIB, MemoryBound, position_bytes
from tests.service.engine.oracle import ask, first_layers, plain_greedy, random_prompt, running

POSITION = 3 * 2 * 2 * 8 * 4  # layers, keys and values, key-value heads, head dimension, bytes


def ignore(_: Generation) -> None:
    pass


def engine_of(target: Target, **config: Any) -> Engine:
    return Engine(target, EngineConfig(**config), ignore)


def test_the_bytes_of_a_position_are_those_of_its_keys_and_values(target: Target) -> None:
    assert position_bytes(target.model.get_decoder()) == POSITION
    assert position_bytes(first_layers(target, layers=1).decoder) == POSITION // 3


def test_slots_that_do_not_fit_are_refused_at_the_start_with_what_would_fit(target: Target) -> None:
    capacity = 100 + 4 + 2
    half = 8 * capacity * POSITION / GIB
    with pytest.raises(MemoryBound, match=r"target: 16 slots of 106 positions .* REDRAFT_SLOTS \(about 8 fit\)"):
        engine_of(target, slots=16, context=100, kv_memory=half)
    engine_of(target, slots=8, context=100, kv_memory=half)


def test_a_drafter_that_does_not_fit_is_refused_and_the_engine_goes_on(target: Target) -> None:
    room = 4 * (128 + 4 + 2) * POSITION * 1.5 / GIB
    prompt = random_prompt(target, 1)
    with running(target, first_layers(target, layers=1), kv_memory=room) as engine:
        with pytest.raises(MemoryBound, match="drafter version 2"):
            engine.swap(2, first_layers(target, layers=2))
        assert engine.lanes.version() == 1
        assert ask(engine, prompt).wait() == plain_greedy(target, prompt, 24)


def test_a_predecessor_that_stays_counts_too(target: Target) -> None:
    room = 4 * (128 + 4 + 2) * POSITION * 1.5 / GIB
    with running(target, first_layers(target, layers=1), kv_memory=room) as engine:
        with pytest.raises(MemoryBound, match="drafter version 2"):
            engine.swap(2, first_layers(target, layers=1, seed=1), holdback=0.5)
        assert engine.swap(2, first_layers(target, layers=1, seed=1)).result(timeout=30) == 2
