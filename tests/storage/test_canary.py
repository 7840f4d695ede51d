"""Canaries: sent out, promoted or recalled in one transaction each, and never two moves at once."""

from pathlib import Path

import pytest
from sqlalchemy import Engine, select

from storage import audit, outbox
from storage.canary import Canaries
from storage.database import reading
from storage.history import fold
from storage.registry import CanaryOut, PointerMoved, Quarantined, Registry, Version
from storage.shares import share_of
from storage.tables import AuditRow
from storage.watches import Watches
from storage.weights import WeightsStore
from tests.storage.rows import make_candidate, make_drafter, make_record, make_round

Versions = tuple[Version, Version, Version]


@pytest.fixture
def registry(engine: Engine) -> Registry:
    return Registry(engine)


@pytest.fixture
def canaries(engine: Engine) -> Canaries:
    return Canaries(engine)


@pytest.fixture
def versions(registry: Registry, tmp_path: Path) -> Versions:
    """Version 1, live, and candidates 2 and 3."""
    store = WeightsStore(tmp_path / "weights")
    first = make_drafter(registry)
    return first, make_candidate(registry, store, first, "a"), make_candidate(registry, store, first, "b")


@pytest.fixture
def out(canaries: Canaries, versions: Versions) -> Version:
    """Version 2, which serves a tenth of the requests."""
    canaries.send_out(versions[1], versions[0], 0.1, "worker", "the gate let it through")
    return versions[1]


def states(registry: Registry) -> list[str]:
    return [summary.state for summary in registry.versions("chat")]


def kinds(registry: Registry) -> list[str]:
    return [event.kind for event in registry.events("chat")]


def test_sending_out_says_everything_at_once_and_leaves_what_is_live(registry: Registry, out: Version) -> None:
    pointer = registry.pointer("chat")
    assert (pointer.live.number, pointer.canary, pointer.generation, pointer.kind) == (1, out, 2, "canary")
    assert (pointer.canary_share, pointer.holdback) == (pytest.approx(0.1), 0.0)
    event = registry.events("chat")[0]
    assert (event.kind, event.before, event.after, event.reason) == ("canary", 1, 2, "the gate let it through")
    assert states(registry) == ["live", "canary", "candidate"]
    assert [i.version for i in registry.intervals("chat")] == [1]
    assert outbox.pending(registry.engine)[-1].payload == {"drafter": "chat", "generation": 2}
    with reading(registry.engine) as session:
        entry = session.scalars(select(AuditRow).order_by(AuditRow.id.desc())).first()
    assert entry is not None
    assert (entry.action, entry.before, entry.after) == (
        "pointer.canary",
        {"live": 1, "canary": None, "generation": 1},
        {"live": 1, "canary": 2, "generation": 2},
    )
    assert audit.verify(registry.engine) is None
    watch = Watches(registry.engine).open("chat")
    assert watch is not None
    assert (watch.version, watch.predecessor, watch.share, watch.canary) == (2, 1, 0.9, True)


def test_sending_out_twice_changes_nothing(
    registry: Registry, canaries: Canaries, versions: Versions, out: Version
) -> None:
    again = canaries.send_out(out, versions[0], 0.1, "worker", "a crash came between")
    assert (again.generation, kinds(registry)) == (2, ["canary", "init"])


def test_a_sending_out_that_fails_half_way_leaves_everything_as_it_was(
    registry: Registry, canaries: Canaries, versions: Versions, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(outbox, "add", fail)
        with pytest.raises(OSError, match="disk is full"):
            canaries.send_out(versions[1], versions[0], 0.1, "worker", "")
    assert (registry.pointer("chat").generation, kinds(registry)) == (1, ["init"])
    assert Watches(registry.engine).open("chat") is None


def test_the_canarys_requests_are_told_from_the_others(engine: Engine, out: Version) -> None:
    watch = Watches(engine).open("chat")
    assert watch is not None
    names, since = [f"r{n}" for n in range(60)], watch.opened_at.timestamp() + 1
    fold(engine, [make_record(name, (make_round(2, 4, 1),), finished_at=since) for name in names])
    seen = Watches(engine).observations(watch)
    assert [not o.held for o in seen] == [share_of(f"request-{name}") >= 0.9 for name in names]
    assert [o.strayed for o in seen] == [o.held for o in seen]  # the canary drafted for all of them
    assert 0 < sum(not o.held for o in seen) < 20


@pytest.mark.parametrize("state", ["safe", "ended"])
def test_a_promotion_ends_it_with_the_watchs_verdict_and_holds_the_old_version_back(
    registry: Registry, canaries: Canaries, versions: Versions, out: Version, state: str
) -> None:
    pointer = canaries.promote(out, versions[0], state, "watch", "no fall", holdback=0.2)
    assert (pointer.live, pointer.previous, pointer.canary, pointer.generation) == (out, versions[0], None, 3)
    assert (pointer.holdback, pointer.kind) == (0.2, "promote")
    after, before = Watches(registry.engine).recent("chat", 2)
    assert (before.state, before.reason, after.state, after.canary) == (state, "no fall", "open", False)
    assert kinds(registry) == ["promote", "canary", "init"]
    assert states(registry) == ["retired", "live", "candidate"]
    assert canaries.promote(out, versions[0], state, "watch", "again").generation == 3
    assert registry.rollback("chat", None, "cli:me", "").live == versions[0]


def test_a_recall_ends_it_without_blame(
    registry: Registry, canaries: Canaries, versions: Versions, out: Version
) -> None:
    pointer = canaries.recall(out, "ended", "watch", "nothing was shown")
    assert (pointer.live.number, pointer.canary, pointer.generation, pointer.kind) == (1, None, 3, "recall")
    summary = registry.versions("chat")[1]
    assert (summary.state, summary.reason) == ("rolled_back", "nothing was shown")
    assert registry.versions("chat")[0].state == "live"
    assert Watches(registry.engine).recent("chat", 1)[0].state == "ended"
    assert canaries.recall(out, "ended", "watch", "again").generation == 3
    assert canaries.promote(out, versions[0], "safe", "watch", "too late").live.number == 1


def test_one_that_is_worse_is_recalled_and_quarantined(
    registry: Registry, canaries: Canaries, versions: Versions, out: Version
) -> None:
    pointer = registry.take_back(out, "server:s1", "below the floor")
    assert (pointer.live.number, pointer.canary, pointer.generation) == (1, None, 3)
    assert (states(registry)[1], registry.versions("chat")[1].reason) == ("quarantined", "below the floor")
    assert Watches(registry.engine).recent("chat", 1)[0].state == "worse"
    assert registry.take_back(out, "server:s2", "below the floor").generation == 3
    with pytest.raises(Quarantined):
        canaries.send_out(out, versions[0], 0.1, "worker", "once more")


def test_while_it_is_out_nothing_else_is_promoted_or_sent_out(
    registry: Registry, canaries: Canaries, versions: Versions, out: Version
) -> None:
    with pytest.raises(CanaryOut, match="version 2 of chat is out as a canary"):
        registry.promote(versions[2], versions[0], "worker", "better")
    with pytest.raises(CanaryOut, match="version 2 of chat is out as a canary"):
        canaries.send_out(versions[2], versions[0], 0.1, "worker", "better")
    assert kinds(registry) == ["canary", "init"]


def test_an_operators_promotion_of_another_version_recalls_it(
    registry: Registry, versions: Versions, out: Version
) -> None:
    pointer = registry.promote(versions[2], versions[0], "cli:me", "this one", recall=True)
    assert (pointer.live.number, pointer.canary, pointer.generation) == (3, None, 4)
    assert kinds(registry) == ["promote", "recall", "canary", "init"]
    assert states(registry) == ["retired", "rolled_back", "live"]
    assert registry.versions("chat")[1].reason == "promote to version 3: this one"
    assert Watches(registry.engine).recent("chat", 1)[0].state == "overtaken"


def test_an_operator_may_promote_it_early(registry: Registry, versions: Versions, out: Version) -> None:
    pointer = registry.promote(out, versions[0], "cli:me", "I am sure", 0.1, recall=True)
    assert (pointer.live, pointer.canary, pointer.holdback) == (out, None, 0.1)
    assert kinds(registry) == ["promote", "canary", "init"]


def test_an_operators_rollback_recalls_it_and_leaves_what_is_live(registry: Registry, out: Version) -> None:
    pointer = registry.rollback("chat", None, "cli:me", "not today")
    assert (pointer.live.number, pointer.canary) == (1, None)
    assert (states(registry)[1], registry.versions("chat")[1].reason) == ("rolled_back", "not today")


def test_a_rollback_to_a_named_version_moves_there_and_recalls_it(
    registry: Registry, canaries: Canaries, versions: Versions
) -> None:
    first, second, third = versions
    registry.promote(second, first, "worker", "better")
    canaries.send_out(third, second, 0.1, "worker", "better still")
    pointer = registry.rollback("chat", 1, "cli:me", "all of it")
    assert (pointer.live.number, pointer.canary) == (1, None)
    assert kinds(registry)[:2] == ["rollback", "recall"]
    assert pointer.previous is None


def test_it_ends_the_holdback_of_the_version_before(registry: Registry, canaries: Canaries, versions: Versions) -> None:
    first, second, third = versions
    registry.promote(second, first, "worker", "better", holdback=0.1)
    canaries.send_out(third, second, 0.1, "worker", "better still")
    over, before = Watches(registry.engine).recent("chat", 2)
    assert (over.canary, over.state, before.canary, before.state) == (True, "open", False, "overtaken")
    assert canaries.recall(third, "ended", "watch", "").previous == first
    assert registry.rollback("chat", None, "cli:me", "").live == first


def test_who_expected_another_version_to_be_live_is_told(
    registry: Registry, canaries: Canaries, versions: Versions
) -> None:
    first, second, third = versions
    registry.promote(second, first, "worker", "better")
    with pytest.raises(PointerMoved, match="version 2 of chat is live, not version 1"):
        canaries.send_out(third, first, 0.1, "worker", "better")


def test_a_share_of_most_requests_is_refused(canaries: Canaries, versions: Versions) -> None:
    with pytest.raises(ValueError, match=r"above 0 and up to 0.5"):
        canaries.send_out(versions[1], versions[0], 0.6, "worker", "")
