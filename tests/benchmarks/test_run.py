"""From the engine's events to rounds: what counts as a round's time, and what was a prefill's."""

import pytest

from benchmarks.run import Event, progress_of


def test_plain_rounds_of_one_request_are_the_gaps_between_its_tokens() -> None:
    events = [Event(0.0, 0, "sent"), Event(1.0, 0, "first", 1), Event(1.1, 0, "round", 1), Event(1.3, 0, "round", 3)]
    progress = progress_of(events)
    assert progress.tokens == 4
    assert progress.round_ms == pytest.approx((100.0, 200.0))
    assert progress.per_ms == pytest.approx(4 / 300)


def test_a_round_of_a_batch_lasts_until_its_last_request_was_told() -> None:
    events = [Event(0.0, 0, "sent"), Event(0.0, 1, "sent"), Event(1.0, 0, "first", 1), Event(2.0, 1, "first", 1)]
    events += [
        Event(2.1, 0, "round", 1),
        Event(2.2, 1, "round", 2),
        Event(2.3, 0, "round", 1),
        Event(2.5, 1, "round", 1),
    ]
    progress = progress_of(events)
    assert progress.round_ms == pytest.approx((200.0, 300.0))
    assert progress.tokens == 5


def test_rounds_in_whose_time_prompts_are_read_are_left_out() -> None:
    events = [Event(0.0, 0, "sent"), Event(1.0, 0, "first", 1), Event(1.1, 0, "round", 1)]
    events += [Event(1.1, 1, "sent"), Event(1.9, 0, "round", 1), Event(2.5, 1, "first", 1)]
    events += [Event(2.7, 0, "round", 1), Event(2.8, 1, "round", 1)]
    progress = progress_of(events)
    assert progress.round_ms == pytest.approx((100.0, 300.0))
    assert progress.tokens == 3


def test_a_request_that_is_sent_within_a_round_does_not_undo_that_round() -> None:
    events = [Event(0.0, i, "sent") for i in (0, 1)] + [Event(1.0, i, "first", 1) for i in (0, 1)]
    events += [Event(1.1, 0, "round", 1), Event(1.1, 2, "sent"), Event(1.2, 1, "round", 1), Event(1.9, 2, "first", 1)]
    progress = progress_of(events)
    assert progress.round_ms == pytest.approx((200.0,))
    assert progress.tokens == 2


def test_no_round_is_no_progress() -> None:
    assert progress_of([Event(0.0, 0, "sent"), Event(1.0, 0, "first", 1)]).per_ms == 0.0
