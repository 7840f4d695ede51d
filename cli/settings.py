"""All settings there are, and how commands read them.

The settings classes stand beside their users, some of which need torch: they are named here and imported when
asked for, so that `redraft --help` and the operator's commands stay quick.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from getpass import getuser
from importlib import import_module
from typing import Any, TypeVar

from cli.output import warn
from storage.config import PREFIX, read, setting, variable

T = TypeVar("T")

SETTINGS_CLASSES = (
    "cli.settings:CommandConfig",
    "storage.config:StorageConfig",
    "storage.retention:RetentionConfig",
    "adapter.target:TargetConfig",
    "service.app:ServeConfig",
    "service.engine.engine:EngineConfig",
    "service.engine.governor:GovernorConfig",
    "service.engine.floor:FloorConfig",
    "adapter.typical:TypicalConfig",
    "service.hosts.lossy:LossyConfig",
    "service.live:LiveConfig",
    "service.feedback:FeedbackConfig",
    "service.hosts.llamacpp.blue_green:LlamaCppConfig",
    "service.hosts.sglang.push:SglangPushConfig",
    "service.hosts.sglang_plugin.pointer:PointerConfig",
    "service.hosts.sidecar.config:SidecarConfig",
    "service.hosts.vllm_push.push:VllmPushConfig",
    "worker.config:TriggerConfig",
    "worker.config:TrainerConfig",
    "worker.config:LineageConfig",
    "adapter.distil:DistilConfig",
    "adapter.rescore:RescoreConfig",
    "worker.engine_teacher:EngineTeacherConfig",
    "adapter.distributed:DistributedConfig",
    "adapter.gate:GateConfig",
    "adapter.watch:WatchConfig",
    "adapter.drift:DriftConfig",
    "adapter.routing:RoutingConfig",
    "cli.logs:LogConfig",
)


@dataclass(frozen=True)
class CommandConfig:
    """What commands act on."""

    drafter: str = setting("", "name of the general drafter; empty: the only one of the target that is not routed")


def settings_classes() -> tuple[type[Any], ...]:
    """The settings classes themselves, in the order of the README's table."""
    found = []
    for name in SETTINGS_CLASSES:
        module, _, cls = name.partition(":")
        found.append(getattr(import_module(module), cls))
    return tuple(found)


def settings(cls: type[T]) -> T:
    """One settings class, from this process's environment."""
    return read(cls, os.environ)


def actor() -> str:
    """Who is at work here, for the audit log."""
    try:
        return f"cli:{getuser()}"
    except (OSError, KeyError, ImportError):  # a container's user without a name
        return f"cli:{os.getuid()}"


def warn_unknown() -> None:
    """Name the variables that look like settings and are none: a misspelt setting is silently a default."""
    for line in unknown(os.environ):
        warn(line)


def unknown(environ: Mapping[str, str]) -> list[str]:
    """A sentence for each `REDRAFT_*` variable that no settings class has."""
    names = {f.name for cls in settings_classes() for f in fields(cls)}
    known = {variable(name) for name in names}
    lines = []
    for given in sorted(environ):
        if given.startswith(PREFIX) and given not in known:
            near = get_close_matches(given.removeprefix(PREFIX).lower(), names, n=1)
            lines.append(f"{given} is no setting of redraft" + (f"; did you mean {variable(near[0])}?" if near else ""))
    return lines
