"""Announcements of a moved pointer: heard at once, and only a hint."""

import threading
import time
from collections.abc import Iterator

import pytest

from storage import announcements
from storage.announcements import POINTER_CHANNEL, Announcements, announce, announce_routes
from tests.valkey_fixture import ValkeyServer
from tests.waiting import until


@pytest.fixture(autouse=True)
def soon_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A listener that lost its server asks for it again without a pause worth the name."""
    monkeypatch.setattr(announcements, "RECONNECT_SECONDS", 0.05)


@pytest.fixture
def listener(valkey: ValkeyServer) -> Iterator[Announcements]:
    listening = subscribed(Announcements(valkey.url, "chat"))
    yield listening
    listening.close()


def subscribed(listener: Announcements) -> Announcements:
    """Once it hears what is announced."""
    until(lambda: listener.wait(0.05) or listener.connected)
    return listener


def test_a_moved_pointer_ends_the_wait_at_once(valkey: ValkeyServer, listener: Announcements) -> None:
    threading.Timer(0.1, announce, (valkey.client(), "chat", 2)).start()
    began = time.monotonic()
    assert listener.wait(60)
    assert time.monotonic() - began < 30


def test_another_drafters_pointer_does_not_end_the_wait(valkey: ValkeyServer, listener: Announcements) -> None:
    announce(valkey.client(), "code", 2)
    assert not listener.wait(0.2)


def test_routes_of_the_listeners_target_end_the_wait(valkey: ValkeyServer) -> None:
    listener = subscribed(Announcements(valkey.url, "chat", target="target-1"))
    announce_routes(valkey.client(), "target-2", 7)
    assert not listener.wait(0.1)
    announce_routes(valkey.client(), "target-1", 8)
    assert listener.wait(30)
    announce(valkey.client(), "chat", 2)
    assert listener.wait(30)
    listener.close()


def test_routes_do_not_concern_who_names_no_target(valkey: ValkeyServer, listener: Announcements) -> None:
    announce_routes(valkey.client(), "target-1", 8)
    assert not listener.wait(0.1)


@pytest.mark.parametrize("forged", [b"", b"{", b"[1]", b'{"drafter": 7, "generation": 1}', b"\xff\xfe"])
def test_a_message_of_another_form_is_ignored(valkey: ValkeyServer, listener: Announcements, forged: bytes) -> None:
    valkey.client().publish(POINTER_CHANNEL, forged)
    assert not listener.wait(0.1)
    announce(valkey.client(), "chat", 2)
    assert listener.wait(30)


def test_without_redis_the_wait_is_as_long_as_without_messages() -> None:
    listener = Announcements("unix:///nobody/listens.sock", "chat")
    began = time.monotonic()
    assert not listener.wait(0.3)
    assert 0.29 < time.monotonic() - began < 10
    assert not listener.connected


def test_after_a_restart_of_redis_announcements_are_heard_again(own_valkey: ValkeyServer) -> None:
    listener = subscribed(Announcements(own_valkey.url, "chat"))
    own_valkey.kill()
    assert not listener.wait(0.1)
    assert not listener.connected
    own_valkey.start()
    subscribed(listener)
    announce(own_valkey.client(), "chat", 2)
    assert listener.wait(30)
    listener.close()


def test_a_cut_connection_is_made_again(valkey: ValkeyServer, listener: Announcements) -> None:
    valkey.client().client_kill_filter(_type="pubsub")
    until(lambda: not listener.wait(0.01) and not listener.connected)
    subscribed(listener)
    announce(valkey.client(), "chat", 2)
    assert listener.wait(30)


def test_listening_ends_with_a_message_or_when_it_is_told_to(valkey: ValkeyServer, listener: Announcements) -> None:
    ended = threading.Event()
    threading.Timer(0.1, announce, (valkey.client(), "chat", 2)).start()
    began = time.monotonic()
    listener.listen(60, ended.is_set)
    threading.Timer(0.1, ended.set).start()
    listener.listen(60, ended.is_set)
    assert time.monotonic() - began < 50
