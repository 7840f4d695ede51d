"""What `redraft doctor` looks at. Each check returns a line, or raises with one."""

import os
import re
import time
import uuid
from datetime import UTC, datetime
from functools import cached_property
from typing import Any

from redis import Redis
from sqlalchemy import Engine

from cli.doctor import Look
from cli.nearby import ask_nearby
from cli.output import CommandError, age
from cli.settings import CommandConfig, settings, settings_classes, unknown
from storage.config import StorageConfig, read
from storage.database import check_migrated, now, open_database, reading
from storage.redis_clients import admin
from storage.registry import Drafter, Registry
from storage.servers import WORKERS, Servers
from storage.weights import BlobDamaged, WeightsStore

OLDEST_REDIS = (7, 0)
CLOCK_SECONDS = 5.0
HISTORY_SECONDS = 120.0  # feedback that waits longer to be folded has no housekeeper
DROPPED = re.compile(r'^redraft_feedback_dropped_total\{.*?reason="(\w+)".*?\} ([0-9.e+]+)$', re.MULTILINE)

MENDING = {
    "settings": "correct or remove the variable; the README lists all of them",
    "target": "`redraft init` fetches it; else set REDRAFT_TARGET",
    "database": "run `redraft migrate`, or set REDRAFT_DATABASE_URL",
    "audit log": "rows were changed by hand: find out by whom, and restore a backup",
    "Redis": "start it (`redraft up` does), or set REDRAFT_REDIS_URL",
    "weights store": "make the folder writable, or set REDRAFT_WEIGHTS",
    "stored weights": "restore the files from a backup, or roll back to a whole version (`redraft rollback --to N`)",
    "purges": "run `redraft purge --tenant T` again, or start `redraft housekeeper`, which goes on with it",
    "drafter": "make one with `redraft init NAME`, or set REDRAFT_DRAFTER",
    "targets": "serve the old target again, or make a drafter for the new one with `redraft init NAME`",
    "servers": "start `redraft serve`, or read its log",
    "hosts": "start the engine without its lossy settings; REDRAFT_ENGINE_LOSSLESS=yes if you know that it has none",
    "worker": "start what is missing: `redraft trainer`, `redraft housekeeper`, `redraft beat`",
    "feedback": "see that `redraft housekeeper` and `redraft beat` run",
    "clocks": "synchronise the clocks (NTP)",
}


class Checks:
    """The parts as the settings describe them, opened when a check first needs them."""

    @cached_property
    def storage(self) -> StorageConfig:
        return settings(StorageConfig)

    @cached_property
    def database(self) -> Engine:
        return open_database(self.storage.sql_url)

    @cached_property
    def registry(self) -> Registry:
        return Registry(self.database)

    @cached_property
    def redis(self) -> Redis:
        return admin(self.storage.stream_url)

    @cached_property
    def weights(self) -> WeightsStore:
        return WeightsStore(self.storage.weights_folder)

    @cached_property
    def files(self) -> Any:
        """The target's files, without fetching anything."""
        os.environ["HF_HUB_OFFLINE"] = "1"
        from adapter import smollm2
        from adapter.target import TargetConfig, fetch

        config = settings(TargetConfig)
        if config.target == smollm2.NAME and not (config.cache.expanduser() / smollm2.FOLDER).is_dir():
            raise CommandError(f"{config.target} was not fetched yet")
        return fetch(config)

    @cached_property
    def drafter(self) -> Drafter:
        return self.registry.choose(settings(CommandConfig).drafter, self.files.fingerprint)

    def looks(self) -> tuple[Look, ...]:
        """All checks, each after those that it needs."""
        mend = MENDING
        return (
            Look("settings", self.look_at_settings, mend["settings"]),
            Look("target", self.look_at_target, mend["target"], ("settings",)),
            Look("database", self.look_at_database, mend["database"], ("settings",)),
            Look("audit log", self.look_at_audit, mend["audit log"], ("database",)),
            Look("Redis", self.look_at_redis, mend["Redis"], ("settings",)),
            Look("weights store", self.look_at_store, mend["weights store"], ("settings",)),
            Look("stored weights", self.look_at_blobs, mend["stored weights"], ("database", "weights store")),
            Look("purges", self.look_at_purges, mend["purges"], ("database",)),
            Look("drafter", self.look_at_drafter, mend["drafter"], ("database", "target")),
            Look("targets", self.look_at_targets, mend["targets"], ("database",)),
            Look("servers", self.look_at_servers, mend["servers"], ("drafter",)),
            Look("hosts", self.look_at_hosts, mend["hosts"], ("database",)),
            Look("worker", self.look_at_worker, mend["worker"], ("database",)),
            Look("feedback", self.look_at_feedback, mend["feedback"], ("Redis", "drafter")),
            Look("clocks", self.look_at_clocks, mend["clocks"], ("database", "Redis")),
        )

    def look_at_settings(self) -> str:
        classes = settings_classes()
        for cls in classes:
            read(cls, os.environ)
        if strange := unknown(os.environ):
            raise CommandError("; ".join(strange))
        return "all variables are known and have usable values"

    def look_at_target(self) -> str:
        return f"{self.files.name} in {self.files.path}, fingerprint {self.files.fingerprint[:12]}"

    def look_at_database(self) -> str:
        check_migrated(self.database)
        return f"{self.database.url.render_as_string(hide_password=True)} is at this version's revision"

    def look_at_audit(self) -> str:
        from storage.audit import verify

        broken = verify(self.database)
        if broken is not None:
            raise CommandError(f"row {broken} does not follow from the row before it")
        return "the chain is whole"

    def look_at_redis(self) -> str:
        server: dict[str, Any] = self.redis.info("server")
        name = "Valkey" if "valkey_version" in server else "Redis"
        version = str(server.get("valkey_version", server["redis_version"]))
        if tuple(int(part) for part in version.split(".")[:2]) < OLDEST_REDIS:
            raise CommandError(f"{name} {version} is too old: 7.0 or later is needed")
        policy = str(self.redis.info("memory")["maxmemory_policy"])
        if policy != "noeviction":
            raise CommandError(f"{name} {version} has maxmemory-policy {policy}: set it to noeviction")
        return f"{name} {version}, noeviction"

    def look_at_store(self) -> str:
        """Write, rename and read back a small file."""
        blob = self.weights.put(f"redraft doctor {uuid.uuid4()}".encode())
        self.weights.get(blob.sha256)
        self.weights.delete(blob.sha256)
        return f"{self.weights.folder} can be written and read"

    def look_at_blobs(self) -> str:
        """Every version's file is there and is what its digest says."""
        drafters = self.registry.drafters()
        versions = [(d.name, s) for d in drafters for s in self.registry.versions(d.name)]
        damaged = []
        for name, summary in versions:
            if summary.weights_deleted:
                continue
            try:
                self.weights.get(summary.version.weights_sha256)
            except BlobDamaged as error:
                damaged.append(f"version {summary.version.number} of {name} ({summary.state}): {error}")
        if damaged:
            raise CommandError("; ".join(damaged))
        kept = sum(not summary.weights_deleted for _, summary in versions)
        return f"the files of {kept} versions are whole" + (
            f"; {len(versions) - kept} were deleted for their age" if kept < len(versions) else ""
        )

    def look_at_purges(self) -> str:
        from storage.purge import unfinished

        if begun := unfinished(self.database):
            raise CommandError("; ".join(f"that of tenant {p.tenant}, begun {p.started_at:%F %T}" for p in begun))
        return "none is unfinished"

    def look_at_drafter(self) -> str:
        live = self.registry.live(self.drafter.name)
        return f"{self.drafter.name} was made for this target; version {live.number} is live"

    def look_at_servers(self) -> str:
        pointer = self.registry.pointer(self.drafter.name)
        alive = Servers(self.database).live(self.drafter.name)
        if not alive:
            raise CommandError(f"no server of {self.drafter.name} gave a sign of life lately")
        behind = [f"{s.id} serves version {s.version} ({s.error or 'swapping'})" for s in alive
                  if s.generation != pointer.generation]  # fmt: skip
        if behind:
            raise CommandError(f"version {pointer.live.number} is live, but " + "; ".join(behind))
        return f"{len(alive)} alive, all with version {pointer.live.number}"

    def look_at_targets(self) -> str:
        """No drafter's target was changed, unless another drafter is for the new one."""
        from storage.target_changes import stopped

        changes = stopped(self.database).values()
        if alone := [change.reason for change in changes if not change.successor]:
            raise CommandError("; ".join(alone))
        return "; ".join(change.reason for change in changes) or "no drafter's target has changed"

    def look_at_hosts(self) -> str:
        from cli.hosts import lossy_lines

        hosts = Servers(self.database).hosts()
        if lossy := lossy_lines(hosts):
            raise CommandError("; ".join(lossy))
        kinds = sorted({server.host_kind for server in hosts})
        return f"{', '.join(kinds) or 'none'} attached; none is known to be lossy"

    def look_at_worker(self) -> str:
        seen = {server.host_kind: server.last_seen for server in Servers(self.database).live("")}
        if missing := [role for role in WORKERS if role not in seen]:
            raise CommandError(f"no sign of life of {', '.join(missing)}")
        return ", ".join(f"{role} {age(seen[role])} ago" for role in WORKERS)

    def look_at_feedback(self) -> str:
        from storage.stream import ADAPT, HISTORY, FeedbackStream

        stream = FeedbackStream(self.redis, self.drafter.name)
        adapt, history = stream.waiting(ADAPT), stream.waiting(HISTORY)
        if history.count and history.oldest_age_seconds > HISTORY_SECONDS:
            raise CommandError(f"{history.count} records wait to be folded, since {history.oldest_age_seconds:.0f} s")
        quarantined = int(self.redis.xlen(stream.quarantine_key))
        return (
            f"{adapt.count} records wait for training, {history.count} for the history; "
            f"{quarantined} in quarantine; dropped here: {dropped() or 'none'}"
        )

    def look_at_clocks(self) -> str:
        with reading(self.database) as session:
            sql = abs((now(session) - datetime.now(UTC)).total_seconds())
        seconds, micros = self.redis.time()
        redis = abs(seconds + micros / 1e6 - time.time())
        if max(sql, redis) > CLOCK_SECONDS:
            raise CommandError(f"the database's clock differs by {sql:.1f} s, that of Redis by {redis:.1f} s")
        return "database and Redis agree with this machine"


def dropped() -> str:
    """What the server on this machine dropped, by reason; empty where it dropped nothing or does not run."""
    from service.app import ServeConfig

    config = settings(ServeConfig)
    try:
        with ask_nearby(f"http://{config.host}:{config.port}/metrics", timeout=2) as reply:
            figures = DROPPED.findall(reply.read().decode())
    except OSError:
        return ""
    return ", ".join(f"{reason} {float(count):.0f}" for reason, count in figures if float(count))
