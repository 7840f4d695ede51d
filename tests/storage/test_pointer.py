"""The live pointer: compare and set, one transaction, racing promoters, and what was live when."""

import itertools
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import Engine, update
from sqlalchemy.exc import IntegrityError

from storage import audit, outbox
from storage.database import transaction
from storage.registry import NothingToRollBackTo, PointerMoved, Registry, Version
from storage.tables import IntervalRow, PointerRow
from storage.weights import WeightsStore
from tests.storage.rows import make_candidate, make_drafter

NAMES = itertools.count()


@pytest.fixture
def registry(engine: Engine) -> Registry:
    return Registry(engine)


@pytest.fixture
def store(tmp_path: Path) -> WeightsStore:
    return WeightsStore(tmp_path / "weights")


@pytest.fixture
def versions(registry: Registry, store: WeightsStore) -> list[Version]:
    """Version 1, live, and candidates 2 to 4."""
    first = make_drafter(registry)
    return [first, *(make_candidate(registry, store, first, name) for name in "abc")]


def test_promoting_moves_everything_at_once(registry: Registry, versions: list[Version]) -> None:
    first, second, *_ = versions
    pointer = registry.promote(second, first, "trainer", "better")
    assert (pointer.live, pointer.previous, pointer.generation) == (second, first, 2)
    event = registry.events("chat")[0]
    assert (event.kind, event.before, event.after, event.actor, event.reason) == (
        "promote", 1, 2, "trainer", "better",
    )  # fmt: skip
    assert [i.version for i in registry.intervals("chat")] == [1, 2]
    assert outbox.pending(registry.engine)[-1].payload == {"drafter": "chat", "generation": 2}
    assert audit.verify(registry.engine) is None


def test_a_move_that_fails_half_way_leaves_everything_as_it_was(
    registry: Registry, versions: list[Version], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = _everything(registry)

    def fail(*_: object) -> None:
        raise OSError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(outbox, "add", fail)  # the last step of a move
        with pytest.raises(OSError, match="disk is full"):
            registry.promote(versions[1], versions[0], "trainer", "")
    assert _everything(registry) == before
    assert registry.promote(versions[1], versions[0], "trainer", "").generation == 2


def test_promoting_what_is_live_changes_nothing(registry: Registry, versions: list[Version]) -> None:
    registry.promote(versions[1], versions[0], "trainer", "")
    before = _everything(registry)
    registry.promote(versions[1], versions[0], "trainer", "told twice")
    assert _everything(registry) == before


def test_who_expected_another_version_is_told_what_is_live(registry: Registry, versions: list[Version]) -> None:
    first, second, third, _ = versions
    registry.promote(second, first, "trainer", "")
    with pytest.raises(PointerMoved, match="version 2 of chat is live, not version 1"):
        registry.promote(third, first, "trainer", "")
    assert registry.live("chat") == second


def test_of_racing_promoters_one_wins(engine: Engine, registry: Registry, versions: list[Version]) -> None:
    barrier, won, lost = threading.Barrier(3), list[int](), list[str]()

    def promote(candidate: Version) -> None:
        barrier.wait()
        try:
            won.append(Registry(engine).promote(candidate, versions[0], "trainer", "").live.number)
        except PointerMoved as error:
            lost.append(str(error))

    threads = [threading.Thread(target=promote, args=(candidate,)) for candidate in versions[1:]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert won == [registry.live("chat").number]
    assert len(lost) == 2
    assert registry.pointer("chat").generation == 2


def test_rolling_back_goes_to_the_version_before(registry: Registry, versions: list[Version]) -> None:
    registry.promote(versions[1], versions[0], "trainer", "")
    pointer = registry.rollback("chat", None, "me", "complaints")
    assert (pointer.live, pointer.generation) == (versions[0], 3)
    assert registry.events("chat")[0].kind == "rollback"


def test_rolling_back_again_goes_further_back(registry: Registry, versions: list[Version]) -> None:
    for before, after in itertools.pairwise(versions):
        registry.promote(after, before, "trainer", "")
    went_to = [registry.rollback("chat", None, "me", "").live.number for _ in range(3)]
    assert went_to == [3, 2, 1]
    with pytest.raises(NothingToRollBackTo, match="version 1 of chat is live and replaced none"):
        registry.rollback("chat", None, "me", "")


def test_after_a_promotion_on_top_of_a_rollback_the_good_version_is_the_one_before(
    registry: Registry, versions: list[Version]
) -> None:
    first, bad, good, _ = versions
    registry.promote(bad, first, "trainer", "")
    registry.rollback("chat", None, "me", "")
    registry.promote(good, first, "trainer", "")
    assert registry.pointer("chat").previous == first


def test_rolling_back_to_a_number_goes_there(registry: Registry, versions: list[Version]) -> None:
    for before, after in itertools.pairwise(versions):
        registry.promote(after, before, "trainer", "")
    assert registry.rollback("chat", 2, "me", "").live == versions[1]


def test_rolling_back_to_what_is_live_changes_nothing(registry: Registry, versions: list[Version]) -> None:
    before = _everything(registry)
    registry.rollback("chat", 1, "me", "told twice")
    assert _everything(registry) == before


def test_the_database_itself_refuses_a_version_of_another_drafter(
    engine: Engine, registry: Registry, versions: list[Version]
) -> None:
    stranger = make_drafter(registry, "code", "target-2")
    chat = update(PointerRow).where(PointerRow.drafter_id == registry.drafter("chat").id)
    with pytest.raises(IntegrityError), transaction(engine) as session:
        session.execute(chat.values(live_id=stranger.id))


def test_a_clock_set_back_turns_no_interval_round(engine: Engine, registry: Registry, versions: list[Version]) -> None:
    in_an_hour = datetime.now(UTC) + timedelta(hours=1)
    with transaction(engine) as session:
        session.execute(update(IntervalRow).values(started_at=in_an_hour))
    registry.promote(versions[1], versions[0], "trainer", "")
    one, two = registry.intervals("chat")
    assert one.started_at == one.ended_at == two.started_at == in_an_hour


@given(steps=st.lists(st.one_of(st.none(), st.integers(1, 4)), max_size=8))
@settings(max_examples=15, derandomize=True)
def test_intervals_are_disjoint_and_cover_all_the_time_since_the_start(
    registry: Registry, store: WeightsStore, steps: list[int | None]
) -> None:
    """A step promotes that version, or rolls back (None)."""
    name = f"d{next(NAMES)}"
    first = make_drafter(registry, name)
    versions = [first, *(make_candidate(registry, store, first, f"{name}-{n}") for n in range(3))]
    served = list(_walk(registry, name, versions, steps))
    intervals = registry.intervals(name)
    assert [i.version for i in intervals] == served
    assert all(a.ended_at == b.started_at for a, b in itertools.pairwise(intervals))
    assert intervals[-1].ended_at is None
    assert all(i.ended_at is None or i.started_at <= i.ended_at for i in intervals)
    for interval in intervals:
        if interval.ended_at is None or interval.started_at < interval.ended_at:
            at_start = registry.live_at(name, interval.started_at)
            assert at_start is not None
            assert at_start.number == interval.version
    assert registry.live_at(name, intervals[0].started_at - timedelta(seconds=1)) is None
    assert registry.live_at(name, datetime.now(UTC) + timedelta(hours=1)) == registry.live(name)


def _walk(registry: Registry, name: str, versions: list[Version], steps: list[int | None]) -> Iterator[int]:
    """Take the steps; the numbers that were live, in turn."""
    yield 1
    for step in steps:
        before = registry.pointer(name)
        if step is None and before.previous is not None:
            yield registry.rollback(name, None, "me", "").live.number
        elif step is not None and step != before.live.number:
            yield registry.promote(versions[step - 1], before.live, "me", "").live.number


def _everything(registry: Registry) -> tuple[object, ...]:
    return (
        registry.pointer("chat"), registry.intervals("chat"), registry.events("chat"),
        registry.versions("chat"), outbox.pending(registry.engine), audit.verify(registry.engine),
    )  # fmt: skip
