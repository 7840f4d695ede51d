"""The demo's end: four arms on unseen prompts, with the rollback to version 1 and the way forward between them."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from adapter.target import Target, TargetConfig, load
from adapter.versions import Versions
from cli.demo.comparison import Arm, Judge, measure, plain_arm, speculative_arm
from cli.demo.prompts import Workload
from cli.demo.traffic import Clients
from cli.opened import Opened
from cli.operate import Moved, announce_moves, wait_for_servers
from cli.settings import actor
from service.engine.engine import EngineConfig
from storage.config import read
from storage.registry import Event, Pointer
from storage.weights import WeightsStore

WAIT_SECONDS = 30.0


@dataclass(frozen=True)
class Finale:
    """Plain decoding, the first and the last version, the last one governed, and the moves of the pointer between."""

    arms: tuple[Arm, Arm, Arm, Arm]
    back: Moved
    forward: Moved
    events_before: tuple[Event, ...]  # what had happened to the pointer until then


def compare(clients: Clients, opened: Opened, parts: Sequence[Workload], environ: Mapping[str, str]) -> Finale:
    """Measure plain decoding and the last version; go back to version 1 and measure that; go forward again.

    The governed arm comes last, when the governor has seen all the others' rounds.
    """
    registry, name = opened.registry, opened.drafter.name
    events = tuple(registry.events(name, limit=1000))
    first, last = registry.version(name, 1), registry.live(name)
    k = read(EngineConfig, environ).draft_length
    plain, plain_speed = measure(clients, parts, 0)
    after, after_speed = measure(clients, parts, k)
    back = _moved(opened, lambda: registry.rollback(name, 1, actor(), "demo: back to version 1"))
    before, before_speed = measure(clients, parts, k)
    forward = _moved(opened, lambda: registry.promote(last, first, actor(), "demo: forward again"))
    governed, governed_speed = measure(clients, parts, None)
    judge = _judge(opened, environ)
    arms = (
        plain_arm(plain, plain_speed),
        speculative_arm("first", first, k, before, before_speed, plain, judge),
        speculative_arm("last", last, k, after, after_speed, plain, judge),
        speculative_arm("governed", last, k, governed, governed_speed, plain, judge),
    )
    return Finale(arms, back, forward, events)


def _moved(opened: Opened, move: Callable[[], Pointer]) -> Moved:
    """Move the pointer and wait until every server has acknowledged it, as `redraft rollback` does."""
    began = time.perf_counter()
    pointer = move()
    announce_moves(opened)
    return wait_for_servers(opened, pointer, began, WAIT_SECONDS)


def _judge(opened: Opened, environ: Mapping[str, str]) -> Judge:
    target: Target = load(read(TargetConfig, environ))
    store = WeightsStore(opened.config.weights_folder)
    return Judge(target, Versions(store, target.files, target.embedding), opened.drafter)
