"""The drafter's side of a sidecar: what the engine was found to be, the drafter, its feedback, and its live version.

Engine, database and Redis may each be away when the sidecar starts, and come and go: requests pass meanwhile, and this
attaches what turns up. Nothing here is ever waited for by a request.
"""

import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Final

import structlog
from sqlalchemy.exc import SQLAlchemyError

from adapter.fingerprints import TargetNotFound, identify
from service.feedback import FeedbackWriter
from service.hosts import lossy
from service.hosts.capabilities import HOSTS, Capabilities, host_of
from service.hosts.sidecar.config import SidecarConfig
from service.hosts.sidecar.engine_client import AWAY, EngineClient
from service.hosts.sidecar.findings import Findings
from service.hosts.sidecar.following import Following, MadeReady, Surroundings
from service.hosts.sidecar.history import row_of_totals
from service.hosts.sidecar.observing import Ended
from service.hosts.sidecar.probe import NoEngine, probe
from service.hosts.sidecar.prompts import prompt_ids
from service.hosts.sidecar.reading import Seen
from service.hosts.sidecar.recording import Told, Unusable, record_of
from service.hosts.sidecar.scraper import Scraper
from service.hosts.swapping import SwapFailed
from service.origin import Origin
from storage import target_changes
from storage.capabilities import Rounds, Teacher
from storage.history import add
from storage.registry import Drafter, UnknownDrafter

LOOK_SECONDS: Final = 2.0
SEE_SECONDS: Final = 15.0  # some engines' settings can be changed while they run
REFUSED_SECONDS: Final = 60.0  # without observation after an engine has refused to be observed

log = structlog.get_logger()


class Attachment:
    """`ready` makes what loads and swaps a drafter's versions."""

    def __init__(
        self,
        around: Surroundings,
        config: SidecarConfig,
        client: EngineClient,
        ready: MadeReady,
        guard: lossy.Guard,
        kind: str = "",
        swaps: bool = False,
    ) -> None:
        """`kind` is the engine's where it is known before it answers, because redraft starts it."""
        self._around, self._config, self._client, self._ready = around, config, client, ready
        self._kind, self._swaps = kind, swaps
        self.guard = guard
        self.findings: Findings | None = None
        self.problem = ""  # why nothing is recorded, where that is so
        self.drafter: Drafter | None = None
        self.writer: FeedbackWriter | None = None
        self.following: Following | None = None
        self._scraper: Scraper | None = None
        self._told = ""
        self._ask_at = 0.0  # monotonic seconds, before which the engine is not asked what it is
        self._see_at = 0.0  # when its settings are looked at again
        self._asking, self._closing = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="attach", daemon=True)

    def start(self, scraper: Scraper | None = None) -> None:
        """Look for engine and drafter from now on; the engine's counters are read around each swap."""
        self._scraper = scraper
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._asking.set()
        if self._thread.is_alive():
            self._thread.join(timeout=10)
        if self.following is not None:
            self.following.follower.close()
        if self.writer is not None:
            self.writer.close()

    def ask_again(self, after: float = 0.0) -> None:
        """The engine does not answer as it did: find out anew, in that many seconds. Until then nothing is observed."""
        self.findings = None
        self._ask_at = time.monotonic() + after
        self._asking.set()

    def engine_restarted(self) -> None:
        """It is another process now, and may be another engine."""
        self.guard.restarted()
        if self.following is not None:
            self.following.engine_restarted()
        self.ask_again()

    def served(self) -> tuple[int | None, int]:
        """The version that proposes, where it is known; and a number that is odd during a swap."""
        return self.following.served if self.following is not None else (None, 0)

    def keep(self, ended: Ended, seen: Seen) -> None:
        """An observed answer into the feedback stream; raises `Unusable`."""
        drafter, writer, following = self.drafter, self.writer, self.following
        if drafter is None or writer is None or following is None:
            raise Unusable("no_drafter")
        if self.problem:
            raise Unusable("wrong_target")
        if not seen.prompt_ids:
            seen.prompt_ids = prompt_ids(self._client, ended.answered.asked)
        origin = Origin(drafter.target_fingerprint, drafter.tokenizer_fingerprint, drafter.name)
        told = Told(origin, self._config.sidecar_temperature, self._config.sidecar_top_k, self.guard.lossless)
        record = record_of(ended.answered, seen, told)
        self.guard.answered(record)
        writer.put(record)
        following.judge(record)
        if seen.totals is not None and ended.dialect_engine == "sglang":  # whose counters say too little
            row = row_of_totals(record, ended.answered.version, seen.totals)
            add(self._around.registry.engine, drafter.name, row)

    def capabilities(self) -> Capabilities | None:
        """What was found, as far as it goes; None where no engine has answered yet."""
        found = self.findings
        if found is None:
            return None
        best = host_of(self.host if self.host in HOSTS else "sidecar_vllm").capabilities
        plans = found.plans.values()
        steps, totals = any(plan.steps for plan in plans), any(plan.totals for plan in plans)
        rounds: Rounds = "reconstructed" if steps else "totals" if totals or best.rounds == "totals" else "none"
        teacher: Teacher = "top_k" if found.dialect.top_k and any(plan.top_k for plan in plans) else "none"
        swap = best.swap if self._swaps else "none"
        here = replace(best, rounds=rounds, teacher=teacher, swap=swap, engine=found.engine)
        return self.guard.applied(here)

    @property
    def host(self) -> str:
        """The kind of host that this is, as in service/hosts/capabilities."""
        return f"sidecar_{self._kind or (self.findings or Findings.none()).dialect.engine}"

    @property
    def counts_rounds(self) -> bool:
        """Whether records carry rounds, so that the engine's own counters must not be added to the history."""
        return self.findings is not None and any(plan.steps for plan in self.findings.plans.values())

    def _run(self) -> None:
        while not self._closing.is_set():
            self._look()
            self._asking.wait(LOOK_SECONDS)
            self._asking.clear()

    def _look(self) -> None:
        try:
            if self.findings is None and time.monotonic() >= self._ask_at and not (self._kind and self.drafter is None):
                self._find_out()
            elif self.findings is not None and time.monotonic() >= self._see_at:
                self.see_settings(self.findings)
            if self.drafter is None and (self.findings is not None or self._kind):
                self._attach()
            if self.following is not None and self.findings is not None:
                self.following.serve_again()
        except (SQLAlchemyError, ValueError, NoEngine, SwapFailed, *AWAY) as error:
            self._tell(f"{type(error).__name__}: {error}")

    def _find_out(self) -> None:
        found = probe(self._client, self._config)
        self.see_settings(found)
        for sentence in found.missing:
            log.warning("sidecar.missing", what=sentence)
        observed = [str(form) for form in found.plans]
        log.info("sidecar.engine", engine=found.engine, model=found.model, observed=observed)
        self.findings = found
        if self.drafter is not None:
            self._check_target(self.drafter)

    def see_settings(self, found: Findings) -> None:
        """Look at the engine's settings for what would make its output another than the target's."""
        self._see_at = time.monotonic() + SEE_SECONDS
        engine = found.dialect.engine
        if engine == "vllm":
            self.guard.saw(lossy.vllm_server(self._client.told("/server_info?config_format=json")))
        elif engine == "sglang":
            self.guard.saw(lossy.sglang_server(self._client.told("/server_info")))
        elif engine == "llamacpp":
            self.guard.saw(lossy.llamacpp(self._client.told("/props")))
        elif engine == "redraft":
            self.guard.saw(lossy.Seen(known=True))  # it marks what it verifies lossily, and serves that on request only

    def _attach(self) -> None:
        around = self._around
        try:
            drafter = around.registry.choose(around.drafter)
        except UnknownDrafter as none:
            self._tell(str(none))
            return
        self._check_target(drafter)
        ready = self._ready(drafter)
        self.writer = FeedbackWriter.of(around.storage, drafter.name, around.feedback)
        self.following = Following(drafter, self.host, around, ready, self.capabilities, self._scraper)
        self.drafter = drafter
        self.following.follower.start()
        log.info("drafter.attached", drafter=drafter.name)

    def _check_target(self, drafter: Drafter) -> None:
        """Where the engine's model is a folder of this machine, it must be the drafter's target."""
        found, database = self._fingerprint(), self._around.registry.engine
        witness = f"server {self._around.server_id}"
        if found in ("", drafter.target_fingerprint):
            if found:
                target_changes.settle(database, drafter.name, witness)
            self.problem = ""
            return
        self.problem = (
            f"the engine's model is not the target of drafter {drafter.name}: nothing is recorded. Make a drafter for "
            "it (redraft init) and name it in REDRAFT_DRAFTER"
        )
        log.error("sidecar.wrong_target", problem=self.problem)
        target_changes.notice(database, drafter.name, found, "server", witness)

    def _fingerprint(self) -> str:
        """Of the engine's model; empty where it cannot be told from here."""
        root = Path(self.findings.root) if self.findings is not None and self.findings.root else None
        try:
            if root is None or not root.is_dir():
                return ""
            return identify(root.name, root, self._around.storage.home).fingerprint
        except (TargetNotFound, OSError):
            return ""

    def _tell(self, reason: str) -> None:
        """Once, until it is another one."""
        if reason != self._told:
            log.warning("sidecar.waiting", reason=reason)
        self._told = reason
