"""What the sidecar says of itself, under /redraft: health, what its engine was found to tell, and figures."""

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any, Final

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from service.hosts.sidecar.attachment import Attachment
from service.hosts.sidecar.observing import Observer
from service.hosts.sidecar.scraper import Scraper
from service.hosts.sidecar.upstream import Upstream

JSON: Final = b"application/json"
Answer = tuple[int, bytes, bytes]


class Own:
    """Answers under /redraft; reads the parts' own state, and changes nothing."""

    def __init__(self, upstream: Upstream, observer: Observer, attachment: Attachment, scraper: Scraper) -> None:
        self._upstream, self._attachment = upstream, attachment
        self._registry = CollectorRegistry()
        self._registry.register(_Figures(upstream, observer, attachment, scraper))
        self._pages: dict[str, Callable[[], Answer]] = {
            "/health": self._health,
            "/health/live": self._health,
            "/health/ready": self._health,
            "/capabilities": self._capabilities,
            "/metrics": lambda: (200, CONTENT_TYPE_LATEST.encode(), generate_latest(self._registry)),
        }

    def __call__(self, path: str) -> Answer:
        if path not in self._pages:
            there = ", ".join(f"/redraft{page}" for page in self._pages)
            return _json({"error": {"message": f"there is no such page of the sidecar; there are {there}"}}, 404)
        return self._pages[path]()

    def _health(self) -> Answer:
        """The sidecar passes requests as long as it answers this. The engine has a health page of its own."""
        attachment, found = self._attachment, self._attachment.findings
        follower = attachment.following.follower if attachment.following is not None else None
        return _json(
            {
                "status": "ok",
                "engine": found.engine if found else "has not answered yet",
                "url": self._upstream.url,
                "observing": bool(found and found.plans) and attachment.drafter is not None and not attachment.problem,
                "drafter": attachment.drafter.name if attachment.drafter else None,
                "version": attachment.served()[0],
                "problem": attachment.problem or (follower.error if follower else ""),
            }
        )

    def _capabilities(self) -> Answer:
        """What the engine was found to tell, form by form, and what is missing."""
        found, sums = self._attachment.findings, self._attachment.capabilities()
        if found is None or sums is None:
            return _json({"error": {"message": "the engine has not answered yet"}}, 503)
        forms = {
            str(form): {"token_ids": plan.token_ids, "steps": plan.steps, "totals": plan.totals, "top_k": plan.top_k}
            for form, plan in found.plans.items()
        }
        return _json(
            {
                "engine": found.engine,
                "model": found.model,
                "host": asdict(sums),
                "forms": forms,
                "missing": found.missing,
            }
        )


def _json(value: Any, status: int = 200) -> Answer:
    return status, JSON, json.dumps(value).encode()


class _Figures(Collector):
    """Reads the parts' counters when Prometheus asks."""

    def __init__(self, upstream: Upstream, observer: Observer, attachment: Attachment, scraper: Scraper) -> None:
        self._upstream, self._observer, self._attachment, self._scraper = upstream, observer, attachment, scraper

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily(
            "redraft_sidecar_in_flight", "Requests at the engine", value=self._upstream.busy(self._upstream.url)
        )
        observed = CounterMetricFamily(
            "redraft_sidecar_observed", "Requests by what became of them", labels=["outcome"]
        )
        for outcome, count in sorted(self._observer.counts.items()):
            observed.add_metric([outcome], count)
        yield observed
        yield from self._feedback()
        yield from self._engine()

    def _feedback(self) -> Iterator[Metric]:
        writer, following = self._attachment.writer, self._attachment.following
        if writer is None or following is None:
            return
        follower = following.follower
        name, version = [follower.drafter], self._attachment.served()[0]
        live = GaugeMetricFamily("redraft_live_version", "Version that proposes; 0: none", labels=["drafter"])
        live.add_metric(name, version or 0)
        written = CounterMetricFamily("redraft_feedback_written", "Records that Redis confirmed", labels=["drafter"])
        written.add_metric(name, writer.written)
        dropped = CounterMetricFamily("redraft_feedback_dropped", "Records lost", labels=["drafter", "reason"])
        for reason, count in sorted(writer.dropped.items()):
            dropped.add_metric([*name, reason], count)
        swaps = CounterMetricFamily("redraft_swaps", "Versions swapped in", labels=["drafter"])
        swaps.add_metric(name, follower.swaps)
        failures = CounterMetricFamily("redraft_swap_failures", "Versions that could not be", labels=["drafter"])
        failures.add_metric(name, follower.failures)
        yield from (live, written, dropped, swaps, failures)

    def _engine(self) -> Iterator[Metric]:
        """All of the engine's traffic by version, out of its own counters; records are of the observed share.

        With what is known of how it verifies: what a lossy engine accepts says nothing of a drafter.
        """
        labels, verifies = ["version", "verification"], self._attachment.guard.losslessness
        drafts = CounterMetricFamily("redraft_engine_spec_decode_num_drafts", "Rounds with a proposal", labels=labels)
        proposed = CounterMetricFamily("redraft_engine_spec_decode_num_draft_tokens", "Proposed", labels=labels)
        accepted = CounterMetricFamily("redraft_engine_spec_decode_num_accepted_tokens", "Accepted", labels=labels)
        for version, grown in sorted(self._scraper.totals.items()):
            drafts.add_metric([str(version), verifies], grown.drafts)
            proposed.add_metric([str(version), verifies], grown.proposed)
            accepted.add_metric([str(version), verifies], grown.accepted)
        gauges = GaugeMetricFamily("redraft_engine_gauge", "What the engine says of its last rounds", labels=["name"])
        for gauge, value in sorted(self._scraper.gauges.items()):
            gauges.add_metric([gauge], value)
        yield from (drafts, proposed, accepted, gauges)
