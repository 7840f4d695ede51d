"""`redraft hosts`: the servers that are attached, what each can do, and how far each kind of host was checked."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from cli.opened import JsonOption, database
from cli.output import age, say, show_json, table, warn
from service.hosts.capabilities import HOSTS, Host

if TYPE_CHECKING:
    from storage.capabilities import Capabilities
    from storage.servers import Server

NOBODY = "no server gave a sign of life lately: start one (docs/hosts.md says how)"
COLUMNS = ("server", "host", "engine", "drafter", "rounds", "teacher", "swap", "verification", "checked", "last seen")
KINDS = ("host", "rounds", "teacher", "swap", "drafters", "checked", "how")


def hosts(json: JsonOption = False) -> None:
    """List what is attached, its capabilities, and whether each host was run live, checked, or only designed."""
    from storage import target_changes
    from storage.servers import Servers

    engine = database()
    servers, stopped = Servers(engine).hosts(), list(target_changes.stopped(engine).values())
    if json:
        show_json({
            "servers": [_server_json(server) for server in servers],
            "stopped": [{**asdict(change), "reason": change.reason} for change in stopped],
            "hosts": [_host_json(host) for host in HOSTS.values()],
        })  # fmt: skip
        return
    table("attached", COLUMNS, [_cells(server) for server in servers], empty=NOBODY)
    for server in servers:
        if server.error:
            say(f"{server.id}: {server.error}")
    for line in (*lossy_lines(servers), *(change.reason for change in stopped)):
        warn(line)
    table("\nkinds of host", KINDS, [_kind_cells(host) for host in HOSTS.values()])


def lossy_lines(servers: "Sequence[Server]") -> list[str]:
    """A sentence for each server whose figures are lossy, or may be."""
    said = []
    for server in servers:
        found = server.capabilities
        if found is not None and found.losslessness == "lossy":
            settings = ", ".join(found.lossy_settings) or "as the operator states"
            said.append(f"{server.id} is LOSSY ({settings}): its requests are counted apart and never learnt from")
        elif found is not None and found.losslessness == "unknown":
            said.append(
                f"{server.id} does not say whether it is lossless, so its requests are counted as lossy until enough "
                "greedy answers were the target's own: set REDRAFT_ENGINE_LOSSLESS=yes if you know that it is"
            )
    return said


def capabilities_of(server: "Server") -> "Capabilities | None":
    """What a server says of itself, else what its kind can do at best; None where nothing is known of the kind."""
    if server.capabilities is not None:
        return server.capabilities
    kind = HOSTS.get(server.host_kind)
    return kind.capabilities if kind else None


def _cells(server: "Server") -> tuple[str, ...]:
    found, kind = capabilities_of(server), HOSTS.get(server.host_kind)
    can = (found.rounds, found.teacher, found.swap, found.losslessness) if found else ("-", "-", "-", "unknown")
    return (
        server.id,
        server.host_kind,
        (found and found.engine) or "-",
        server.drafter or "-",
        *can,
        kind.checked if kind else "-",
        f"{age(server.last_seen)} ago",
    )


def _kind_cells(host: Host) -> tuple[str, ...]:
    can = host.capabilities
    return host.name, can.rounds, can.teacher, can.swap, ", ".join(can.kinds), host.checked, host.how_checked


def _server_json(server: "Server") -> dict[str, Any]:
    kind = HOSTS.get(server.host_kind)
    return {
        **asdict(server),
        "capabilities": capabilities_of(server),
        "reported": server.capabilities is not None,
        "checked": kind.checked if kind else None,
        "how_checked": kind.how_checked if kind else None,
    }


def _host_json(host: Host) -> dict[str, Any]:
    return {**asdict(host), "refuses": dict(host.refuses)}
