"""Drift: has a workload's acceptance fallen, and which workload is new? Run by the housekeeper, so no torch here.

`river` is not used: its wheel of 2.7 MB brings SciPy, its detectors are kept by pickle, and 50 lines are enough here.

The series is accepted / verified by request, verified being what was accepted and what was refused: an estimate of
the acceptance probability which, unlike accepted / proposed, does not fall when the governor proposes more. Short
requests are taken together until enough positions are seen. A request that was decoded plainly has no rounds: some of
those the trainer replays with the live drafter (`worker/agreement`), and their agreement is a series of its own.
A new version begins a new series: whether the version is worse is the watch's question, not drift.

The detector is Page and Hinkley's (a CUSUM) on standardised values, self-starting: the mean and spread come from the
series itself, of which a suspected fall is no part until the suspicion is gone. By simulation (tests/adapter/
test_drift.py): at most 5 false alarms in 100,000 requests of ordinary series, 12 of a very skewed one; a fall of 0.2
is found after 7 to 10 requests in the median, one of 0.1 after 19 to 27 where requests are alike.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from math import sqrt

from storage.config import setting
from storage.drift import FALL, NOVEL, Finding, Key, Revision, Series
from storage.records import FeedbackRecord

BASE = 20  # values before anything is suspected
MEMORY = 250  # values that the mean and spread go back; a slow change is followed
POSITIONS = 16  # verified positions that make a value; shorter requests are taken together
ALLOWANCE = 0.5  # spreads below the mean that arouse no suspicion: tuned to falls of one spread or more
CLAMP = 4.0  # a single value is no more evidence than this


@dataclass(frozen=True)
class DriftConfig:
    """When a fall of acceptance is an alarm."""

    drift_fall: float = setting(0.1, "fall of a workload's acceptance probability that is worth an alarm")
    drift_evidence: float = setting(10.0, "evidence that an alarm needs; more: fewer false alarms, and later ones")


@dataclass(frozen=True)
class Sample:
    """What one request says of a version."""

    workload: str
    policy: str
    accepted: int
    verified: int


@dataclass(frozen=True)
class Alarm:
    """A fall: acceptance probability before it and since, and over how many requests."""

    before: float
    after: float
    requests: int


@dataclass(frozen=True)
class Detector:
    """Where one series stands. Immutable, and as a dict of numbers it fits into a row."""

    count: float = 0.0  # values of the reference, at most MEMORY
    mean: float = 0.0
    squares: float = 0.0  # sum of squared differences from the mean
    evidence: float = 0.0  # of a fall; 0: none
    run_count: float = 0.0  # the values since the evidence was last 0, which are not in the reference
    run_sum: float = 0.0
    run_squares: float = 0.0
    run_requests: int = 0
    accepted: int = 0  # of requests that await more positions
    verified: int = 0
    requests: int = 0

    @property
    def level(self) -> float | None:
        """The acceptance probability of the series, once there is a value."""
        return self.mean if self.count else None


def observe(detector: Detector, accepted: int, verified: int, config: DriftConfig) -> tuple[Detector, Alarm | None]:
    """One more request; an alarm where it completes the evidence of a fall. The series then begins anew."""
    seen = replace(
        detector,
        accepted=detector.accepted + accepted,
        verified=detector.verified + verified,
        requests=detector.requests + 1,
    )
    if seen.verified < POSITIONS:
        return seen, None
    value, requests = seen.accepted / seen.verified, seen.requests
    seen = replace(seen, accepted=0, verified=0, requests=0)
    if seen.count < BASE:
        return _learned(seen, 1, value, value * value), None
    return _suspected(seen, value, requests, config)


def _suspected(seen: Detector, value: float, requests: int, config: DriftConfig) -> tuple[Detector, Alarm | None]:
    # The floor: without it, a series without spread would raise an alarm at any trifle.
    spread = max(sqrt(seen.squares / (seen.count - 1) * (1 + 1 / seen.count)), config.drift_fall)
    below = max(-CLAMP, min(CLAMP, (seen.mean - value) / spread))
    evidence = max(0.0, seen.evidence + below - ALLOWANCE)
    run = replace(
        seen,
        evidence=evidence,
        run_count=seen.run_count + 1,
        run_sum=seen.run_sum + value,
        run_squares=seen.run_squares + value * value,
        run_requests=seen.run_requests + requests,
    )
    if evidence == 0.0:
        return _learned(run, run.run_count, run.run_sum, run.run_squares), None
    if evidence <= config.drift_evidence:
        return run, None
    alarm = Alarm(before=run.mean, after=run.run_sum / run.run_count, requests=run.run_requests)
    return _learned(Detector(), run.run_count, run.run_sum, run.run_squares), alarm


def _learned(seen: Detector, count: float, total: float, squares: float) -> Detector:
    """The reference with `count` further values, of which the oldest fade; the run is over."""
    kept = min(seen.count, max(0.0, MEMORY - count))
    old = seen.squares * kept / seen.count if seen.count else 0.0
    mean = (kept * seen.mean + total) / (kept + count)
    spread = old + kept * (seen.mean - mean) ** 2 + squares - 2 * mean * total + count * mean * mean
    return Detector(
        count=kept + count,
        mean=mean,
        squares=max(0.0, spread),
        accepted=seen.accepted,
        verified=seen.verified,
        requests=seen.requests,
    )


def follow(known: Mapping[Key, Series], samples: Iterable[Sample], live: int, config: DriftConfig) -> Revision:
    """Go through what requests say of the `live` version, in order."""
    series: dict[Key, Series] = {}
    findings: list[Finding] = []
    workloads = {workload for workload, _ in known}
    for sample in samples:
        key = (sample.workload, sample.policy)
        if sample.workload not in workloads:
            workloads.add(sample.workload)
            findings.append(_novel(*key, live))
        before = series.get(key) or known.get(key)
        if before is None or before.version != live:
            before = Series(live, 0, asdict(Detector()))
        detector, alarm = observe(Detector(**before.state), sample.accepted, sample.verified, config)
        series[key] = Series(live, before.requests + 1, asdict(detector))
        if alarm is not None:
            findings.append(_fall(*key, live, alarm))
    return Revision(series, tuple(findings))


def sampled(request: FeedbackRecord, version: int) -> Sample | None:
    """What a request's rounds say of a version; a refused position was verified, those after it were not.

    None where nothing can be learnt from the request: an update would not help it.
    """
    if not teaches(request):
        return None
    rounds = [r for r in request.rounds if r.version == version]
    accepted = sum(r.accepted for r in rounds)
    verified = accepted + sum(r.accepted < r.proposed for r in rounds)
    return Sample(request.workload, request.policy, accepted, verified)


def is_plain(request: FeedbackRecord) -> bool:
    """Whether a request was greedy and had no proposals, so that only a replay says what a drafter would have done."""
    return teaches(request) and request.exact and not request.rounds and len(request.output) > 1


def teaches(request: FeedbackRecord) -> bool:
    return request.train and request.lossless and not request.structured


def _novel(workload: str, policy: str, live: int) -> Finding:
    reason = f"workload {workload} is new ({policy}): version {live} has not been trained on it"
    return Finding(NOVEL, workload, policy, live, None, None, 1, reason)


def _fall(workload: str, policy: str, live: int, alarm: Alarm) -> Finding:
    reason = (
        f"acceptance probability of workload {workload} ({policy}) fell from {alarm.before:.3f} to {alarm.after:.3f} "
        f"within {alarm.requests} requests of version {live}"
    )
    return Finding(FALL, workload, policy, live, alarm.before, alarm.after, alarm.requests, reason)
