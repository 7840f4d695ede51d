"""Prompts are read in pieces between the rounds of the others."""

from threading import Event

import pytest

from adapter.target import Target
from service.engine import prompts, speculation
from tests.service.engine.oracle import ask, first_layers, plain_greedy, random_prompt, running


@pytest.mark.parametrize("chunk", [1, 3, 7, 64])
def test_a_prompt_read_in_pieces_gives_the_same_output(target: Target, chunk: int) -> None:
    prompts = [random_prompt(target, seed, length) for seed, length in enumerate((1, 6, 7, 40, 13))]
    with running(target, first_layers(target, layers=2), slots=3, prefill_chunk=chunk) as engine:
        outputs = [client.wait() for client in [ask(engine, prompt) for prompt in prompts]]
    assert outputs == [plain_greedy(target, prompt, 24) for prompt in prompts]


def test_others_go_on_while_a_long_prompt_is_read(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two pieces of the long prompt the running request has a round."""
    log: list[str] = []
    begun, sent = Event(), Event()
    read, play = prompts.read_prompt, speculation.play

    def noted_read(*args: object) -> object:
        log.append("read")
        begun.set()
        assert sent.wait(30)
        return read(*args)  # type: ignore[arg-type]

    def noted_play(*args: object) -> object:
        log.append("round")
        return play(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(prompts, "read_prompt", noted_read)
    monkeypatch.setattr(speculation, "play", noted_play)
    with running(target, slots=2, prefill_chunk=10) as decoder:
        short = ask(decoder, random_prompt(target, 1, 5), max_tokens=40)
        assert begun.wait(30)
        long = ask(decoder, random_prompt(target, 2, 80), max_tokens=4)
        sent.set()
        short.wait()
        long.wait()
    assert "read read read" not in " ".join(log[2:])
    assert log.count("read") == 1 + 9  # both prompts share the first piece


def test_a_row_that_leaves_while_a_prompt_is_read_disturbs_neither(target: Target) -> None:
    with running(target, first_layers(target, layers=2), slots=3, prefill_chunk=4) as engine:
        first = ask(engine, random_prompt(target, 1), max_tokens=3)
        second = ask(engine, random_prompt(target, 2), max_tokens=40)
        third = ask(engine, random_prompt(target, 3, 60), max_tokens=20)
        outputs = [client.wait() for client in (first, second, third)]
    asked = ((1, 8, 3), (2, 8, 40), (3, 60, 20))
    assert outputs == [plain_greedy(target, random_prompt(target, s, n), most) for s, n, most in asked]


def test_a_request_cancelled_while_its_prompt_is_read_frees_its_slot(target: Target) -> None:
    with running(target, slots=1, prefill_chunk=1) as engine:
        first = ask(engine, random_prompt(target, 1, 100), max_tokens=5)
        second = ask(engine, random_prompt(target, 2))
        engine.cancel(first.generation.request_id)
        assert second.wait() == plain_greedy(target, random_prompt(target, 2), 24)
        assert engine.running == 0
