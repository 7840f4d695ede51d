"""Prometheus figures of a server: what its requests did, and where engine, feedback and live follower stand.

Requests are counted as they finish; the state of the parts is read when Prometheus asks. The speculative
counters have vLLM's names after our prefix; from them, acceptance rate = accepted / draft tokens and
acceptance length = 1 + accepted / drafts. Rounds that were verified lossily are counted under names of their own.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from service.engine.costs import bucket
from service.engine.engine import Engine
from service.engine.generation import Generation
from service.engine.governor import Choice, Governor
from service.feedback import FeedbackWriter
from service.live import LiveFollower
from storage.records import Round

WORKLOADS = 64  # labels kept apart; clients choose them freely, and each one costs memory here and in Prometheus
OTHER = "other"
SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 150)
ROUND_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1)
disable_created_metrics()  # type: ignore[no-untyped-call]  # one more series for each counter, which nobody reads


class Metrics:
    """All figures of one server, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._workloads: set[str] = set()
        self._requests = self._counter("requests", "Finished requests", "workload", "finish_reason")
        self._tokens = self._counter("output_tokens", "Tokens sent to clients", "workload")
        self._lossy = self._counter("lossy_requests", "Finished requests with typical acceptance", "workload")
        self._followed: dict[str, _Followed] = {}  # by lane
        self._rounds = {
            True: self._round_counters("", ""),
            False: self._round_counters("lossy_", ", typical acceptance"),
        }
        self._first_token = self._histogram("time_to_first_token_seconds", "Wait for the first token", SECONDS)
        self._total = self._histogram("request_seconds", "Duration of a request", SECONDS)
        self._draft = self._histogram("draft_seconds", "Proposing, a round of a request", ROUND_SECONDS)
        self._verify = self._histogram("verify_seconds", "Verification, a round of a request", ROUND_SECONDS)

    def finished(self, generation: Generation, drafter: str = "") -> None:
        """Count a finished request, for which `drafter` proposed; called from the engine's thread."""
        workload = self._label(generation.workload)
        self._requests.labels(workload, generation.finish_reason or "").inc()
        self._tokens.labels(workload).inc(len(generation.output_ids))
        if not generation.lossless:
            self._lossy.labels(workload).inc()
        if generation.first_token_at:
            self._first_token.observe(generation.first_token_at - generation.submitted_at)
        self._total.observe(generation.finished_at - generation.submitted_at)
        self._count_rounds(generation, workload, drafter)

    def watch(self, engine: Engine) -> None:
        """Show the state of the engine, and of the drafters that `follow` names, from now on."""
        self.registry.register(_Parts(engine, self._followed))
        if engine.governor is not None:
            self.registry.register(_Decisions(engine.governor, self._label))

    def follow(self, lane: str, writer: FeedbackWriter, follower: LiveFollower) -> None:
        """Show the state of a lane's parts, under its drafter's name."""
        self._followed[lane] = _Followed(writer, follower)

    def unfollow(self, lane: str) -> None:
        self._followed.pop(lane, None)

    def text(self) -> bytes:
        """Everything, in Prometheus' text format."""
        return generate_latest(self.registry)

    def _count_rounds(self, generation: Generation, workload: str, drafter: str) -> None:
        for r in generation.rounds:
            self._rounds[generation.lossless].add(r, (drafter, str(r.version), workload))
            self._draft.observe(r.draft_ms / 1e3)
            self._verify.observe(r.verify_ms / 1e3)

    def _label(self, workload: str) -> str:
        if workload not in self._workloads and len(self._workloads) >= WORKLOADS:
            return OTHER
        self._workloads.add(workload)
        return workload

    def _round_counters(self, prefix: str, what: str) -> "_RoundCounters":
        named = ("drafter", "version", "workload")
        return _RoundCounters(
            self._counter(f"{prefix}spec_decode_num_drafts", f"Rounds with a proposal{what}", *named),
            self._counter(f"{prefix}spec_decode_num_draft_tokens", f"Proposed tokens{what}", *named),
            self._counter(f"{prefix}spec_decode_num_accepted_tokens", f"Accepted tokens{what}", *named),
            self._counter(
                f"{prefix}spec_decode_num_accepted_tokens_per_pos",
                f"Accepted tokens by position, from 0{what}",
                *named,
                "position",
            ),
        )

    def _counter(self, name: str, help: str, *labels: str) -> Counter:
        return Counter(f"redraft_{name}", help, labels, registry=self.registry)

    def _histogram(self, name: str, help: str, buckets: Iterable[float]) -> Histogram:
        return Histogram(f"redraft_{name}", help, buckets=tuple(buckets), registry=self.registry)


@dataclass(frozen=True)
class _RoundCounters:
    """What rounds did; labels: drafter, version, workload."""

    drafts: Counter
    proposed: Counter
    accepted: Counter
    by_position: Counter

    def add(self, played: Round, labels: tuple[str, str, str]) -> None:
        self.drafts.labels(*labels).inc()
        self.proposed.labels(*labels).inc(played.proposed)
        self.accepted.labels(*labels).inc(played.accepted)
        for position in range(played.accepted):
            self.by_position.labels(*labels, str(position)).inc()


@dataclass(frozen=True)
class _Followed:
    """A lane's parts."""

    writer: FeedbackWriter
    follower: LiveFollower


class _Parts(Collector):
    """Reads the parts' own counters when Prometheus asks."""

    def __init__(self, engine: Engine, followed: Mapping[str, _Followed]) -> None:
        self._engine, self._followed = engine, followed

    def collect(self) -> Iterator[Metric]:
        engine = self._engine
        yield _gauge("requests_running", "Requests that hold a slot", engine.running)
        yield _gauge("requests_waiting", "Requests that wait for a slot", engine.waiting)
        yield _total("drafter_faults", "Drafters dropped because they failed in a round", engine.lanes.faults)
        yield _totals("identity_audits", "Greedy requests decoded again plainly", "verdict", engine.audit.verdicts)
        yield from self._by_drafter()

    def _by_drafter(self) -> Iterator[Metric]:
        version = _by_name("live_version", "Version that proposes; 0: none")
        generation = _by_name("live_generation", "Move of the live pointer that is applied here")
        waiting = _by_name("feedback_waiting", "Feedback records that wait for Redis")
        swaps = _counted("swaps", "Drafters swapped in")
        failures = _counted("swap_failures", "Versions that could not be loaded or swapped in")
        written = _counted("feedback_written", "Feedback records that Redis confirmed")
        dropped = _counted("feedback_dropped", "Feedback records lost", "reason")
        for lane, parts in list(self._followed.items()):
            name = [parts.follower.drafter]
            version.add_metric(name, self._engine.lanes.version(lane))
            generation.add_metric(name, parts.follower.generation)
            waiting.add_metric(name, parts.writer.waiting)
            swaps.add_metric(name, parts.follower.swaps)
            failures.add_metric(name, parts.follower.failures)
            written.add_metric(name, parts.writer.written)
            for reason, count in sorted(parts.writer.dropped.items()):
                dropped.add_metric([*name, reason], count)
        yield from (version, generation, swaps, failures, waiting, written, dropped)


class _Decisions(Collector):
    """Reads what the governor does, by workload, policy, n-gram match and batch size, when Prometheus asks."""

    def __init__(self, governor: Governor, label: Callable[[str], str]) -> None:
        self._governor, self._label = governor, label

    def collect(self) -> Iterator[Metric]:
        by, found = ("workload", "policy", "match", "batch"), self._choices()
        length = _family("draft_length", "Draft length chosen; 0: plain", *by)
        speed_up = _family("speed_up", "Predicted speed of speculating over plain decoding", *by)
        seconds = _family("round_seconds", "Predicted duration of a round", *by, "decoding")
        progress = _family("tokens_per_second", "Predicted accepted progress", *by, "decoding")
        survival = _family("survival", "Predicted share of rounds that accept so many tokens at least", *by, "tokens")
        for labels, c in found.items():
            length.add_metric(labels, c.draft_length)
            speed_up.add_metric(labels, c.speed_up)
            seconds.add_metric((*labels, "speculative"), c.speculative_ms / 1e3)
            seconds.add_metric((*labels, "plain"), c.plain_ms / 1e3)
            progress.add_metric((*labels, "speculative"), c.speculative_progress * 1e3)
            progress.add_metric((*labels, "plain"), c.plain_progress * 1e3)
            for tokens, share in enumerate(c.survival, 1):
                survival.add_metric((*labels, str(tokens)), share)
        yield from (length, speed_up, seconds, progress, survival)

    def _choices(self) -> dict[tuple[str, str, str, str], Choice]:
        """By labels; of workloads that share one, the choice with the most rounds."""
        found: dict[tuple[str, str, str, str], Choice] = {}
        for choice in sorted(self._governor.decisions(), key=lambda c: -c.rounds):
            labels = (self._label(choice.workload), choice.policy, choice.match, str(bucket(choice.batch)))
            found.setdefault(labels, choice)
        return found


def _family(name: str, help: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"redraft_governor_{name}", help, labels=labels)


def _gauge(name: str, help: str, value: float) -> Metric:
    return GaugeMetricFamily(f"redraft_{name}", help, value=value)


def _by_name(name: str, help: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"redraft_{name}", help, labels=("drafter",))


def _counted(name: str, help: str, *labels: str) -> CounterMetricFamily:
    return CounterMetricFamily(f"redraft_{name}", help, labels=("drafter", *labels))


def _total(name: str, help: str, value: float) -> Metric:
    return CounterMetricFamily(f"redraft_{name}", help, value=value)


def _totals(name: str, help: str, label: str, values: Mapping[str, float]) -> Metric:
    """One total for each value of a label."""
    family = CounterMetricFamily(f"redraft_{name}", help, labels=[label])
    for value, count in sorted(values.items()):
        family.add_metric([value], count)
    return family
