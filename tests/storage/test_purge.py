"""A purge leaves nothing of a tenant, tells who learnt from it, and is finished whatever cuts it short."""

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
from redis import ConnectionError as RedisDown
from redis import Redis
from sqlalchemy import Engine, func, select

from storage import audit, history, pointer, purge, rewritten
from storage.database import reading
from storage.decisions import TrainingInputs, TrainingReport
from storage.exposure import Exposed
from storage.lineage import LineageChanged
from storage.marks import VersionRefused
from storage.records import FeedbackRecord, encode
from storage.redis_clients import consume
from storage.registry import Registry, Version
from storage.stream import ADAPT, HISTORY, FeedbackStream
from storage.tables import AuditRow, FoldedRow, WindowRecordRow
from storage.weights import WeightsStore
from storage.windows import Window, Windows
from tests.storage.rows import make_drafter, make_record, make_round, make_training
from tests.valkey_fixture import ValkeyServer
from tests.waiting import PATIENCE

YESTERDAY = time.time() - 86_400


def record(name: str, tenant: str, finished_at: float = YESTERDAY) -> FeedbackRecord:
    made = make_record(name, rounds=(make_round(1, 4, 2),), finished_at=finished_at)
    return msgspec.structs.replace(made, tenant=tenant)


class Place:
    """Where records are: a drafter's windows, stream and quarantine."""

    def __init__(self, engine: Engine, store: WeightsStore, client: Redis) -> None:
        self.engine, self.store = engine, store
        self.registry, self.windows = Registry(engine), Windows(engine, store)
        self.first = make_drafter(self.registry)
        self.stream = FeedbackStream(client, "chat")

    def window(self, *records: FeedbackRecord, holdout: tuple[FeedbackRecord, ...] = ()) -> Window:
        window = self.windows.keep("chat", records, holdout)
        assert window is not None
        self.windows.close(window, "promoted")
        return self.windows.window(window.id)

    def version(self, parent: Version, window: Window, *replayed: tuple[Window, str]) -> Version:
        """A version of the window, for which also single records of earlier windows were replayed."""
        return self.registry.add_candidate(parent, "cd" * 32, 100, window.id, self.report(parent, window, *replayed))

    def report(self, parent: Version, window: Window, *replayed: tuple[Window, str]) -> TrainingReport:
        earlier = {w.id: w.sha256 for w, _ in replayed}
        inputs = TrainingInputs(
            parent_sha256=parent.weights_sha256,
            windows=(*earlier.items(), (window.id, window.sha256)),
            settings_sha256="",
            replayed=tuple(name for _, name in replayed),
        )
        return replace(make_training(), inputs=inputs)

    def purged(self, tenant: str = "acme", withdraw: bool = False) -> purge.Purge:
        return self.finish(purge.begin(self.engine, tenant, withdraw, "tester"))

    def finish(self, begun: purge.Purge) -> purge.Purge:
        return purge.finish(self.engine, self.store, [self.stream], begun)

    def stored(self) -> bytes:
        """All bytes in the weights store."""
        return b"".join(self.store.get(digest) for digest in self.store.digests())


@pytest.fixture
def place(engine: Engine, valkey: ValkeyServer, tmp_path: Path) -> Iterator[Place]:
    client = consume(valkey.url)
    client.flushall()
    yield Place(engine, WeightsStore(tmp_path / "weights"), client)
    client.close()


def test_the_windows_keep_the_records_of_others_only(place: Place) -> None:
    window = place.window(
        record("a", "acme"), record("b", "other"), holdout=(record("c", "acme"), record("d", "other"))
    )
    done = place.purged()
    after = place.windows.window(window.id)
    kept = place.windows.records(after)
    assert [r.record_id for r in (*kept.training, *kept.holdout)] == ["b", "d"]
    assert (after.training, after.holdout) == (1, 1)
    assert (done.state, done.counts["windows"], done.counts["training"], done.counts["holdout"]) == ("done", 1, 1, 1)
    assert place.windows.known("abcd") == {"b", "d"}


def test_no_file_holds_the_records_any_more(place: Place) -> None:
    window = place.window(record("secret-1", "acme"), record("b", "other"))
    place.window(record("c", "other"))
    place.purged()
    assert b"secret-1" not in place.stored()
    assert not place.store.has(window.sha256)
    (change,) = rewritten.purged_windows(place.engine, [window.id])
    assert change.after_sha256 == place.windows.window(window.id).sha256


def test_a_window_of_nobody_else_is_left_empty(place: Place) -> None:
    window, other = place.window(record("a", "acme")), place.window(record("b", "acme"))
    place.purged()
    for emptied in (window, other):
        kept = place.windows.records(place.windows.window(emptied.id))
        assert (kept.training, kept.holdout) == ((), ())


def test_a_damaged_window_is_emptied(place: Place) -> None:
    window = place.window(record("a", "acme"), record("b", "other"))
    place.store.path(window.sha256).write_bytes(b"secret and broken")
    place.purged()
    assert b"secret" not in place.stored()
    assert place.windows.records(place.windows.window(window.id)).training == ()


def test_stream_and_quarantine_lose_the_records_read_or_not(place: Place) -> None:
    place.stream.append([encode(record(name, "acme")) for name in ("a", "b")])
    taken = place.stream.read(ADAPT, "trainer", 1)  # pending, and not acknowledged
    place.stream.append([encode(record("c", "other")), b"nobody can read this"])
    place.stream.quarantine(b"1-1", encode(record("d", "acme"))[:-3], "cut short")
    place.stream.quarantine(b"1-2", encode(msgspec.structs.replace(record("e", "acme"), schema_version=9)), "schema 9")
    place.stream.quarantine(b"1-3", encode(record("f", "other")), "odd")
    done = place.purged()
    assert len(taken.entries) == 1
    left = place.stream.read(ADAPT, "trainer", 10)
    assert [data for _, data in left.entries] == [encode(record("c", "other"))]
    assert left.lost == 0
    assert place.stream.client.xlen(place.stream.quarantine_key) == 1
    assert (done.counts["stream"], done.counts["unreadable"]) == (3, 2)


def test_after_a_purge_of_the_stream_what_waits_is_still_counted_rightly(place: Place) -> None:
    place.stream.append([encode(record(name, "other")) for name in "ab"])
    place.stream.acknowledge(ADAPT, [i for i, _ in place.stream.read(ADAPT, "trainer", 2).entries])
    place.stream.append([encode(record("c", "acme"))])
    place.purged()
    assert place.stream.waiting(ADAPT).count == 0
    assert place.stream.waiting(HISTORY).count == 2
    place.stream.append([encode(record("d", "other"))])
    assert place.stream.waiting(ADAPT).count == 1


def test_the_marks_of_folded_records_go_and_the_history_stays(place: Place) -> None:
    records = [record("a", "acme"), record("b", "acme"), record("c", "other")]
    assert history.fold(place.engine, records) == 3
    place.window(records[0], records[2])
    place.stream.append([encode(records[1])])
    before = history.history(place.engine, "chat")
    place.purged()
    with reading(place.engine) as session:
        assert set(session.scalars(select(FoldedRow.record_id))) == {"c"}
    assert history.history(place.engine, "chat") == before


def test_another_tenant_is_not_touched(place: Place) -> None:
    window = place.window(record("a", "acme"))
    place.stream.append([encode(record("b", "acme"))])
    done = place.purged("nobody")
    assert place.windows.window(window.id) == window
    assert (done.counts["windows"], done.counts["stream"]) == (0, 0)


def test_records_from_before_the_purge_make_no_window_after_it(place: Place) -> None:
    place.purged()
    late, new = record("a", "acme"), record("b", "acme", finished_at=time.time() + 60)
    window = place.window(late, new, record("c", "other"))
    assert [r.record_id for r in place.windows.records(window).training] == ["b", "c"]


def test_records_that_come_onto_the_stream_too_late_are_swept_off(place: Place) -> None:
    place.purged()
    place.stream.append([encode(record("a", "acme")), encode(record("b", "acme", finished_at=time.time() + 60))])
    assert purge.sweep_late(place.engine, [place.stream], timedelta(hours=1)) == 1
    assert purge.sweep_late(place.engine, [place.stream], timedelta(hours=1)) == 0
    assert len(place.stream.read(ADAPT, "trainer", 10).entries) == 1


def test_versions_that_learnt_from_the_records_are_named_before_and_after(place: Place) -> None:
    mixed = place.window(record("a", "acme"), record("b", "other"), record("c", "acme"))
    clean = place.window(record("d", "other"))
    held = place.window(record("e", "other"), holdout=(record("f", "acme"),))
    second = place.version(place.first, mixed)
    third = place.version(second, clean)
    replaying = place.version(place.first, clean, (mixed, "a"))
    place.version(place.first, held, (mixed, "b"))
    expected = [(second.number, 2, None), (third.number, 0, second.number), (replaying.number, 1, None)]
    assert _exposed(place) == expected
    place.purged()
    assert _exposed(place) == expected
    assert purge.found(place.engine, "acme").training == 0
    how = {v.number: v.how for v in purge.found(place.engine, "acme").versions}
    assert how[2] == "trained on 2 of the records"
    assert how[3] == "descends from version 2"


def test_without_withdrawal_the_live_version_stays_and_where_to_go_back_is_known(place: Place) -> None:
    second = _live(place, place.version(place.first, place.window(record("a", "other"))))
    third = _live(place, place.version(second, place.window(record("b", "acme"))))
    fourth = _live(place, place.version(third, place.window(record("c", "other"))))
    place.purged()
    assert place.registry.live("chat") == fourth
    assert purge.untouched(place.engine, "chat", purge.found(place.engine, "acme").versions) == 2


def test_withdrawal_rolls_back_to_the_last_version_that_did_not_learn_from_them(place: Place) -> None:
    second = _live(place, place.version(place.first, place.window(record("a", "other"))))
    third = _live(place, place.version(second, place.window(record("b", "acme"))))
    fourth = _live(place, place.version(third, place.window(record("c", "other"))))
    done = place.purged(withdraw=True)
    assert place.registry.live("chat") == second
    assert done.counts["rolled_back"] == ["chat: 4 -> 2"]
    states = {s.version.number: s.state for s in place.registry.versions("chat")}
    assert states == {1: "retired", 2: "live", 3: "withdrawn", 4: "withdrawn"}
    event = place.registry.events("chat")[0]
    assert (event.kind, event.before, event.after, event.actor) == ("rollback", 4, 2, "tester")
    assert "tenant acme" in event.reason
    for version in (third, fourth):
        with pytest.raises(VersionRefused, match="was withdrawn"):
            place.registry.promote(version, second, "operator", "try")
        with pytest.raises(VersionRefused, match="was withdrawn"):
            place.registry.rollback("chat", version.number, "operator", "try")


def test_a_later_withdrawal_finds_the_versions_of_an_earlier_purge(place: Place) -> None:
    _live(place, place.version(place.first, place.window(record("a", "acme"))))
    place.purged()
    place.purged(withdraw=True)
    assert place.registry.live("chat") == place.first


def test_who_purged_what_is_in_the_audit_log_in_figures(place: Place) -> None:
    place.version(place.first, place.window(record("secret-1", "acme")))
    place.purged()
    with reading(place.engine) as session:
        row = session.scalars(select(AuditRow).where(AuditRow.action == "tenant.purge")).one()
    assert (row.actor, row.subject, row.after["training"], row.after["versions"]) == (
        "tester", "tenant/acme", 1, ["chat/2"],
    )  # fmt: skip
    assert "secret-1" not in str(row.after)
    assert audit.verify(place.engine) is None


def test_a_run_that_read_the_records_before_cannot_keep_its_version(place: Place) -> None:
    window = place.window(record("a", "acme"), record("b", "other"))
    report = place.report(place.first, window)
    place.purged()
    with pytest.raises(LineageChanged, match="was purged while it was trained on"):
        place.registry.add_candidate(place.first, "cd" * 32, 100, window.id, report)
    assert len(place.registry.versions("chat")) == 1


def test_a_run_from_a_version_that_was_withdrawn_meanwhile_is_dropped(place: Place) -> None:
    second = place.version(place.first, place.window(record("a", "acme")))
    window = place.window(record("b", "other"))
    place.purged(withdraw=True)
    with pytest.raises(LineageChanged, match="the parent was withdrawn"):
        place.version(second, window)


def test_with_redis_away_the_windows_are_clean_and_the_purge_stays_unfinished(place: Place) -> None:
    place.window(record("a", "acme"))
    place.stream.append([encode(record("b", "acme"))])
    begun = purge.begin(place.engine, "acme", False, "tester")
    away = FeedbackStream(consume("redis://127.0.0.1:1/0"), "chat")
    with pytest.raises(RedisDown):
        purge.finish(place.engine, place.store, [away], begun)
    assert place.windows.known("a") == set()
    assert [p.id for p in purge.unfinished(place.engine)] == [begun.id]
    done = place.finish(purge.unfinished(place.engine)[0])
    assert (done.counts["training"], done.counts["stream"]) == (1, 1)
    assert purge.unfinished(place.engine) == []


@pytest.mark.parametrize(
    ("where", "name"),
    [
        (WeightsStore, "put"),
        (rewritten, "_forget_records"),
        (rewritten, "_delete_old_files"),
        (WeightsStore, "delete"),
        (purge, "_note_found"),
        (FeedbackStream, "delete"),
        (purge, "_withdraw"),
        (audit, "append"),
    ],
)
def test_killed_at_any_step_it_is_seen_and_finished_by_the_next_attempt(
    place: Place, monkeypatch: pytest.MonkeyPatch, where: object, name: str
) -> None:
    _live(place, place.version(place.first, place.window(record("secret-1", "acme"), record("b", "other"))))
    place.window(record("c", "acme"))
    place.stream.append([encode(record("d", "acme"))])
    history.fold(place.engine, [record("d", "acme")])
    begun = purge.begin(place.engine, "acme", True, "tester")
    with monkeypatch.context() as dying:
        dying.setattr(where, name, _die)
        with pytest.raises(KeyboardInterrupt):
            place.finish(begun)
    assert [p.id for p in purge.unfinished(place.engine)] == [begun.id]
    again = purge.begin(place.engine, "acme", False, "tester")
    assert (again.id, again.withdraw) == (begun.id, True)
    done = place.finish(again)
    assert (done.counts["training"], done.counts["stream"]) == (2, 1)
    assert b"secret-1" not in place.stored()
    assert place.registry.live("chat") == place.first
    with reading(place.engine) as session:
        assert session.scalar(select(func.count()).where(WindowRecordRow.tenant == "acme")) == 0
        assert session.scalar(select(func.count()).select_from(FoldedRow)) == 0
    assert place.finish(done) == done
    assert audit.verify(place.engine) is None


def _die(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def _live(place: Place, version: Version) -> Version:
    place.registry.promote(version, place.registry.live("chat"), "test", "better")
    return version


def _exposed(place: Place) -> list[tuple[int, int, int | None]]:
    def row(v: Exposed) -> tuple[int, int, int | None]:
        return v.number, v.records, v.parent

    return [row(v) for v in purge.found(place.engine, "acme").versions]


def test_a_window_that_is_being_kept_when_a_purge_begins_is_cleaned_as_well(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeping, go_on = threading.Event(), threading.Event()
    store = Windows._store

    def slow(*arguments: Any) -> Any:
        keeping.set()
        assert go_on.wait(PATIENCE)
        return store(*arguments)

    monkeypatch.setattr(Windows, "_store", slow)
    keeper = threading.Thread(target=place.window, args=(record("a", "acme"), record("b", "other")))
    purger = threading.Thread(target=place.purged)
    keeper.start()
    assert keeping.wait(PATIENCE)
    purger.start()
    purger.join(0.3)
    assert purger.is_alive(), "it waits for the window"
    go_on.set()
    keeper.join()
    purger.join()
    assert place.windows.known("ab") == {"b"}


def test_a_withdrawal_and_a_promotion_at_once_both_end(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    second = place.version(place.first, place.window(record("a", "acme")))
    third = place.version(place.first, place.window(record("b", "other")))
    moving, go_on = threading.Event(), threading.Event()
    turn = pointer._turn_interval

    def slow(*arguments: Any) -> None:
        moving.set()
        assert go_on.wait(PATIENCE)
        turn(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(pointer, "_turn_interval", slow)
        promoter = threading.Thread(target=_live, args=(place, third))
        promoter.start()
        assert moving.wait(PATIENCE)  # it holds the pointer, and has yet to write rows that refer to the drafter
        purger = threading.Thread(target=place.purged, kwargs={"withdraw": True})
        purger.start()
        purger.join(0.5)
        go_on.set()
        promoter.join(PATIENCE)
        purger.join(PATIENCE)
    assert not promoter.is_alive()
    assert not purger.is_alive()
    states = {s.version.number: s.state for s in place.registry.versions("chat")}
    assert states == {1: "retired", second.number: "withdrawn", third.number: "live"}
