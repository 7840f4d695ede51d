"""Which drafter a server serves, and what it means where none is for its target: every host asks here.

A drafter belongs to one target's weights. A server with other ones serves on without it; the drafter's adaptation
stops, unless another server still serves its target (`storage/target_changes`).
"""

import structlog

from storage import target_changes
from storage.registry import Drafter, Registry, UnknownDrafter, WrongDrafter
from storage.servers import Servers

log = structlog.get_logger()


def choose(registry: Registry, name: str, target_fingerprint: str, server_id: str) -> Drafter:
    """The drafter called `name`, or its successor for this target; for "" the only general one of the target.

    Raises `UnknownDrafter` or `WrongDrafter`, after it has stopped the drafters that this target has left behind.
    """
    try:
        drafter = registry.choose(name, target_fingerprint)
    except (UnknownDrafter, WrongDrafter):
        _stop_others(registry, name, target_fingerprint, f"server {server_id}")
        raise
    if target_changes.settle(registry.engine, drafter.name, f"server {server_id}"):
        log.info("target.back", drafter=drafter.name)
    return drafter


def _stop_others(registry: Registry, name: str, target_fingerprint: str, by: str) -> None:
    """Drafters of another target that nobody serves any more learn nothing from now on.

    Those are the one that was asked for, or, where none was and none is for this target, all of them.
    """
    drafters = registry.drafters()
    if not name and any(drafter.target_fingerprint == target_fingerprint for drafter in drafters):
        return  # one has only to be chosen
    followed = {server.drafter for server in Servers(registry.engine).hosts()}
    for drafter in drafters:
        if name not in ("", drafter.name) or drafter.name in followed:
            continue
        if change := target_changes.notice(registry.engine, drafter.name, target_fingerprint, "server", by):
            log.error("target.changed", reason=change.reason)
