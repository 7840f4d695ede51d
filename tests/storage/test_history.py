"""Acceptance history: each record once, by version, and sums that agree with the rounds."""

import threading
from datetime import UTC, datetime, timedelta

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import Engine

from storage.history import by_version, fold, forget, history, round_costs, rows_of
from storage.records import FeedbackRecord
from tests.storage.rows import MINUTE, make_record, make_round

ONE = make_record("a", (make_round(1, 4, 2), make_round(1, 4, 4), make_round(1, 3, 0)))
counts = st.integers(0, 8).flatmap(lambda p: st.tuples(st.integers(1, 3), st.just(p), st.integers(0, p)))


def test_a_record_is_counted_as_its_rounds_say(engine: Engine) -> None:
    assert fold(engine, [ONE]) == 1
    (row,) = history(engine, "chat")
    assert (row.version, row.workload, row.policy, row.k) == (1, "code", "greedy", 4)
    assert (row.requests, row.rounds, row.proposed, row.accepted) == (1, 3, 11, 6)
    assert row.histogram == (1, 0, 1, 0, 1)
    assert (row.draft_ms, row.verify_ms, row.total_ms, row.output_tokens) == (6.0, 30.0, 100.0, 8)
    assert row.bucket == datetime.fromtimestamp(MINUTE, UTC)


def test_the_two_figures_are_not_one(engine: Engine) -> None:
    fold(engine, [ONE])
    (row,) = history(engine, "chat")
    assert row.acceptance_rate == 6 / 11
    assert row.acceptance_length == 1 + 6 / 3


LENIENT = msgspec.structs.replace(ONE, record_id="lossy", lossless=False)


def test_what_was_verified_lossily_is_never_taken_together_with_what_was_not(engine: Engine) -> None:
    fold(engine, [ONE, LENIENT, msgspec.structs.replace(LENIENT, record_id="warm", temperature=0.8)])
    rows = {row.policy: row for row in history(engine, "chat")}
    assert {policy: row.lossless for policy, row in rows.items()} == {
        "greedy": True,
        "greedy lossy": False,
        "t0.8 lossy": False,
    }
    assert [row.requests for row in rows.values()] == [1, 1, 1]
    assert {row.policy for row in by_version(engine, "chat")} == rows.keys()
    assert merged_without_policy(engine) == 1


def merged_without_policy(engine: Engine) -> int:
    """Requests behind what the gate is told a round costs."""
    costs = round_costs(engine, "chat", 4)
    assert costs is not None
    return costs.rounds // len(ONE.rounds)


def test_lossy_rounds_alone_say_nothing_of_what_a_round_costs(engine: Engine) -> None:
    fold(engine, [LENIENT])
    assert round_costs(engine, "chat", 4) is None


def test_nothing_proposed_is_a_rate_of_nought(engine: Engine) -> None:
    fold(engine, [make_record("a", (make_round(1, 0, 0),))])
    (row,) = history(engine, "chat")
    assert (row.acceptance_rate, row.acceptance_length) == (0.0, 1.0)


def test_a_record_that_comes_again_adds_nothing(engine: Engine) -> None:
    assert fold(engine, [ONE, ONE]) == 1
    before = history(engine, "chat")
    assert fold(engine, [ONE, make_record("b")]) == 1
    assert history(engine, "chat") == before


def test_records_of_one_minute_are_added_up(engine: Engine) -> None:
    fold(engine, [ONE])
    fold(engine, [msgspec.structs.replace(ONE, record_id="b", finished_at=MINUTE + 59)])
    fold(engine, [msgspec.structs.replace(ONE, record_id="c", finished_at=MINUTE + 60)])
    first, second = history(engine, "chat")
    assert (first.requests, first.rounds, first.histogram) == (2, 6, (2, 0, 2, 0, 2))
    assert second.requests == 1
    assert second.bucket - first.bucket == timedelta(minutes=1)


def test_a_request_over_a_swap_is_split_by_version(engine: Engine) -> None:
    swapped = make_record("a", (make_round(1, 4, 1), make_round(2, 4, 3), make_round(2, 4, 1)), tokens=9)
    fold(engine, [swapped])
    one, two = history(engine, "chat")
    assert (one.version, one.requests, one.rounds, one.accepted, one.histogram) == (1, 1, 1, 1, (0, 1, 0, 0, 0))
    assert (two.version, two.requests, two.rounds, two.accepted, two.histogram) == (2, 1, 2, 4, (0, 1, 0, 1, 0))
    assert (one.output_tokens, two.output_tokens) == (2, 7)  # in proportion to the 2 and 6 committed
    assert (one.total_ms, two.total_ms) == (25.0, 75.0)


def test_a_request_without_rounds_adds_no_row(engine: Engine) -> None:
    assert fold(engine, [make_record("a")]) == 1
    assert history(engine, "chat") == []


def test_workloads_policies_and_draft_lengths_are_kept_apart(engine: Engine) -> None:
    change = msgspec.structs.replace
    others = [
        change(ONE, record_id="b", workload="sql"),
        change(ONE, record_id="c", temperature=0.7),
        change(ONE, record_id="d", rounds=(make_round(1, 2, 2),)),
        change(ONE, record_id="e", drafter="other"),
    ]
    fold(engine, [ONE, *others])
    keys = {(row.workload, row.policy, row.k) for row in history(engine, "chat")}
    assert keys == {("code", "greedy", 4), ("sql", "greedy", 4), ("code", "t0.7", 4), ("code", "greedy", 2)}


def test_by_version_adds_up_minutes_and_draft_lengths(engine: Engine) -> None:
    longer = make_record("b", (make_round(1, 6, 5),), finished_at=MINUTE + 600)
    newer = make_record("c", (make_round(2, 4, 4),))
    fold(engine, [ONE, longer, newer])
    one, two = by_version(engine, "chat")
    assert (one.version, one.k, one.requests, one.accepted) == (1, 6, 2, 11)
    assert one.histogram == (1, 0, 1, 0, 1, 1, 0)
    assert (two.version, two.requests) == (2, 1)


def test_history_since_a_time_begins_with_its_minute(engine: Engine) -> None:
    fold(engine, [ONE, make_record("b", ONE.rounds, finished_at=MINUTE + 120)])
    since = datetime.fromtimestamp(MINUTE + 150, UTC)
    assert [row.bucket for row in history(engine, "chat", since)] == [since - timedelta(seconds=30)]


def test_records_folded_at_once_are_all_counted(engine: Engine) -> None:
    def run(worker: int) -> None:
        for number in range(5):
            fold(engine, [msgspec.structs.replace(ONE, record_id=f"{worker}-{number}"), ONE])

    threads = [threading.Thread(target=run, args=(worker,)) for worker in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (row,) = history(engine, "chat")
    assert (row.requests, row.rounds) == (16, 48)


def test_more_records_than_a_statement_holds_are_folded(engine: Engine) -> None:
    assert fold(engine, [make_record(f"r{number}", ONE.rounds) for number in range(1100)]) == 1100
    assert history(engine, "chat")[0].requests == 1100


def test_forgetting_drops_old_marks_and_keeps_the_counts(engine: Engine) -> None:
    fold(engine, [ONE])
    forget(engine, timedelta(hours=1))
    assert fold(engine, [ONE]) == 0
    forget(engine, timedelta(0))
    assert fold(engine, [ONE]) == 1
    assert history(engine, "chat")[0].requests == 2


@given(rounds=st.lists(counts, max_size=12), tokens=st.integers(0, 60))
def test_splitting_a_record_loses_nothing(rounds: list[tuple[int, int, int]], tokens: int) -> None:
    record: FeedbackRecord = make_record("a", tuple(make_round(*r) for r in rounds), tokens=tokens)
    rows = rows_of(record)
    assert sum(row.rounds for row in rows) == len(rounds)
    assert sum(row.accepted for row in rows) == sum(accepted for _, _, accepted in rounds)
    for row in rows:
        assert sum(row.histogram) == row.rounds
        assert sum(count * rounds for count, rounds in enumerate(row.histogram)) == row.accepted
    if rounds:
        assert sum(row.output_tokens for row in rows) == tokens
        assert abs(sum(row.total_ms for row in rows) - record.total_ms) < 1e-6


def test_the_costs_of_a_round_are_known_by_draft_length(engine: Engine) -> None:
    fold(engine, [ONE, make_record("b", (make_round(2, 2, 1),))])
    costs = round_costs(engine, "chat", 4)
    assert costs is not None
    assert (costs.rounds, costs.draft_ms, costs.verify_ms, costs.ms) == (3, 2.0, 10.0, 12.0)
    assert costs.progress(3.0) == 3.0 / 12.0
    assert round_costs(engine, "chat", 8) is None
