"""Watches and the quarantine: opened by a promotion, closed by the next move, and every request seen once."""

from pathlib import Path

import msgspec
import pytest
from sqlalchemy import Engine, func, select

from storage import audit
from storage.database import reading
from storage.history import fold
from storage.records import FeedbackRecord
from storage.registry import PointerMoved, Quarantined, Registry, Version
from storage.shares import share_of
from storage.tables import ObservationRow
from storage.watches import Watch, Watches
from storage.weights import WeightsStore
from tests.storage.rows import make_candidate, make_drafter, make_record, make_round


@pytest.fixture
def registry(engine: Engine) -> Registry:
    return Registry(engine)


@pytest.fixture
def watches(engine: Engine) -> Watches:
    return Watches(engine)


@pytest.fixture
def versions(registry: Registry, tmp_path: Path) -> tuple[Version, Version, Version]:
    store = WeightsStore(tmp_path / "weights")
    first = make_drafter(registry)
    return first, make_candidate(registry, store, first, "a"), make_candidate(registry, store, first, "b")


@pytest.fixture
def watch(registry: Registry, watches: Watches, versions: tuple[Version, Version, Version]) -> Watch:
    """Version 2 was promoted over version 1; a fifth of the requests is held back."""
    registry.promote(versions[1], versions[0], "worker", "better", holdback=0.2)
    found = watches.open("chat")
    assert found is not None
    return found


def later(watch: Watch, name: str, *accepted: int, version: int) -> FeedbackRecord:
    """A request after the promotion, with a round of four proposals for each count of accepted ones."""
    rounds = tuple(make_round(version, 4, count) for count in accepted)
    return make_record(name, rounds, finished_at=watch.opened_at.timestamp() + 1)


def test_a_promotion_with_a_holdback_opens_a_watch_and_the_pointer_says_so(registry: Registry, watch: Watch) -> None:
    assert (watch.version, watch.predecessor, watch.generation, watch.share) == (2, 1, 2, 0.2)
    pointer = registry.pointer("chat")
    assert (pointer.kind, pointer.holdback) == ("promote", 0.2)
    assert pointer.previous is not None
    assert pointer.previous.number == 1


def test_without_a_holdback_nothing_is_watched(
    registry: Registry, watches: Watches, versions: tuple[Version, Version, Version]
) -> None:
    pointer = registry.promote(versions[1], versions[0], "worker", "better")
    assert (pointer.holdback, watches.open("chat")) == (0.0, None)


def test_requests_are_noted_once_in_their_order_with_what_their_hash_said(
    engine: Engine, watches: Watches, watch: Watch
) -> None:
    names = [f"r{n}" for n in range(40)]
    records = [later(watch, name, 1, 3, version=2) for name in names]
    fold(engine, records[:25])
    fold(engine, records)
    seen = watches.observations(watch)
    assert [o.held for o in seen] == [share_of(f"request-{name}") < 0.2 for name in names]
    assert [o.strayed for o in seen] == [o.held for o in seen]  # version 2 drafted for those held back, too
    one = seen[0]
    assert (one.workload, one.policy, one.proposed, one.accepted, one.tokens, one.ms) == (
        "code",
        "greedy",
        8,
        4,
        6,
        24.0,
    )


def test_what_was_before_the_promotion_or_by_other_versions_is_not_seen(
    engine: Engine, watches: Watches, watch: Watch
) -> None:
    early = msgspec.structs.replace(later(watch, "a", 1, version=1), finished_at=watch.opened_at.timestamp() - 1)
    fold(engine, [early, later(watch, "b", 2, version=7), later(watch, "c", version=2)])
    assert watches.observations(watch) == []


def test_what_was_accepted_leniently_is_not_seen(engine: Engine, watches: Watches, watch: Watch) -> None:
    lossy = msgspec.structs.replace(later(watch, "a", 4, version=2), lossless=False)
    fold(engine, [lossy, later(watch, "b", 1, version=2)])
    assert [o.accepted for o in watches.observations(watch)] == [1]


@pytest.mark.parametrize("by", ["rollback", "promotion"])
def test_an_operators_move_ends_the_watch(
    registry: Registry, watches: Watches, versions: tuple[Version, Version, Version], watch: Watch, by: str
) -> None:
    if by == "rollback":
        registry.rollback("chat", None, "cli:me", "I do not like it")
    else:
        registry.promote(versions[2], versions[1], "cli:me", "newer", holdback=0.1)
    ended = next(w for w in watches.recent("chat", 5) if w.id == watch.id)
    assert ended.state == "overtaken"
    assert ended.reason.endswith("by cli:me: I do not like it" if by == "rollback" else "by cli:me: newer")
    goes_on = watches.open("chat")
    assert (goes_on.version if goes_on else None) == (None if by == "rollback" else 3)


def test_a_version_taken_back_goes_into_quarantine_in_one_go(
    registry: Registry, engine: Engine, watches: Watches, versions: tuple[Version, Version, Version], watch: Watch
) -> None:
    fold(engine, [later(watch, "a", 1, version=2)])
    pointer = registry.take_back(versions[1], "watch", "worse by 0.1")
    assert (pointer.live.number, pointer.kind, pointer.holdback) == (1, "rollback", 0.0)
    event = registry.events("chat")[0]
    assert (event.kind, event.before, event.after, event.actor, event.reason) == (
        "rollback", 2, 1, "watch", "worse by 0.1",
    )  # fmt: skip
    (closed,) = watches.recent("chat", 1)
    assert (closed.state, closed.reason) == ("worse", "worse by 0.1")
    summary = registry.versions("chat")[1]
    assert (summary.state, summary.reason) == ("quarantined", "worse by 0.1")
    assert audit.verify(engine) is None
    with reading(engine) as session:
        assert session.scalar(select(func.count()).select_from(ObservationRow)) == 0


def test_of_several_that_take_a_version_back_one_does_it(
    registry: Registry, versions: tuple[Version, Version, Version], watch: Watch
) -> None:
    for server in ("a", "b", "c"):
        assert registry.take_back(versions[1], f"server:{server}", "below the floor").live.number == 1
    assert registry.pointer("chat").generation == 3
    assert registry.events("chat")[0].actor == "server:a"


def test_a_version_in_quarantine_is_promoted_only_where_that_is_said_outright(
    registry: Registry, versions: tuple[Version, Version, Version], watch: Watch
) -> None:
    registry.take_back(versions[1], "watch", "worse by 0.1")
    with pytest.raises(Quarantined, match=r"version 2 of chat is in quarantine .*worse by 0.1.*--quarantined"):
        registry.promote(versions[1], versions[0], "worker", "better")
    with pytest.raises(Quarantined):
        registry.rollback("chat", 2, "cli:me", "back to it")
    assert registry.live("chat").number == 1
    registry.promote(versions[1], versions[0], "cli:me", "it was not its fault", quarantined=True)
    assert registry.versions("chat")[1].state == "live"
    registry.rollback("chat", None, "cli:me", "once more")
    registry.promote(versions[1], versions[0], "worker", "it is out of quarantine")


def test_a_release_from_quarantine_is_kept_only_with_the_promotion(
    registry: Registry, versions: tuple[Version, Version, Version], watch: Watch
) -> None:
    registry.take_back(versions[1], "watch", "worse")
    with pytest.raises(PointerMoved):
        registry.promote(versions[1], versions[2], "cli:me", "x", quarantined=True)
    assert registry.versions("chat")[1].state == "quarantined"


def test_a_verdict_that_comes_after_the_end_changes_nothing(registry: Registry, watches: Watches, watch: Watch) -> None:
    registry.rollback("chat", None, "cli:me", "x")
    watches.note(watch, 7, [{"a": 1}], "late")
    watches.close(watch, "safe", "late")
    (found,) = watches.recent("chat", 1)
    assert (found.state, found.requests, found.findings) == ("overtaken", 0, [])


def test_what_the_test_says_is_kept(watches: Watches, watch: Watch) -> None:
    watches.note(watch, 7, [{"figure": "acceptance rate", "low": -0.1}], "7 requests so far")
    found = watches.open("chat")
    assert found is not None
    assert (found.requests, found.findings, found.reason) == (
        7, [{"figure": "acceptance rate", "low": -0.1}], "7 requests so far",
    )  # fmt: skip
    assert 0 <= watches.hours(found) < 1
    watches.close(found, "safe", "no fall")
    assert watches.open("chat") is None
