"""The watch after a promotion: is the live version worse than its predecessor? Asked again with every request.

A canary is watched before it is promoted: it is the version, and the predecessor is what is live and keeps the larger
share. What is said here of the two shares holds for any.

A share of the requests stays on the predecessor, drawn by the hash of the request's id. For a figure x in [0, 1]
of a request and any guess m that was made before it,

    d = (x - m) / share  where it was held back,  -(x - m) / (1 - share)  where it was not

has the mean "predecessor minus live" whatever the traffic does: a change that hits both versions alike moves x,
not the mean of d. The guess (what both versions did so far) takes most of d's variance away; with it this is the
augmented inverse-probability estimate.

The test is a bet against "the fall is at most f": capital, the mean over four stakes of the product of
1 + stake * (d - f), grows by more than 1/alpha with a chance of at most alpha if that is true, however often one
looks (Ville). The falls that are not bet away are a confidence sequence, by betting as in Waudby-Smith and
Ramdas (arXiv 2010.09686), on the design's own randomness as in Ham et al. (arXiv 2210.08639).

Union: the j-th workload and policy that turns up gets alpha / (j (j + 1)), half of it for each of its figures.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import log

import numpy as np
import numpy.typing as npt

from storage.config import setting
from storage.observed import Observation

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

STAKES = np.array([[0.8], [0.4], [0.2], [0.1]])  # shares of the largest stake that cannot ruin
WIDEST = 0.5  # falls are told apart within -0.5 to 0.5
HALVINGS = 12
SHRINK = 2.0  # requests that the live version's mean counts as, in the guess for the predecessor's
PROMINENT = 0.1  # share of the requests from which a workload must be safe before the watch ends
STRAYED = 0.1  # share of held-back requests that the live version may have drafted all the same
RATE, PROGRESS = "acceptance rate", "accepted progress"


@dataclass(frozen=True)
class WatchConfig:
    """How a version is watched after its promotion."""

    holdback: float = setting(0.1, "share of the requests that stays on the predecessor after a promotion; 0: none")
    watch_alpha: float = setting(0.05, "chance that a version which is no worse is taken back all the same")
    watch_margin: float = setting(0.05, "fall of the acceptance rate that must be ruled out for the watch to end early")
    watch_requests: int = setting(20_000, "requests after which a watch ends, whatever it has found")
    watch_hours: float = setting(24.0, "hours after which a watch ends, whatever it has found")
    canary: float = setting(0.0, "share of the requests that a candidate serves before it is promoted; 0: none")
    canary_requests: int = setting(5_000, "requests after which a canary is decided on by what was seen")
    canary_hours: float = setting(6.0, "hours after which a canary is decided on by what was seen")

    def __post_init__(self) -> None:
        if not 0.0 <= self.holdback <= 0.5:
            raise ValueError(f"holdback must lie between 0 and 0.5, not {self.holdback}")
        if not 0.0 <= self.canary <= 0.5:
            raise ValueError(f"canary must lie between 0 and 0.5, not {self.canary}")
        if not 0.0 < self.watch_alpha < 1.0:
            raise ValueError(f"watch_alpha must lie between 0 and 1, not {self.watch_alpha}")


@dataclass(frozen=True)
class Finding:
    """One figure of one workload and policy: both versions, and the confidence sequence of the fall."""

    workload: str
    policy: str
    figure: str  # RATE, or PROGRESS in tokens a millisecond
    held: int  # requests on the predecessor
    others: int  # requests on the live version
    predecessor: float | None  # mean over requests; None without any
    live: float | None
    low: float  # of the fall; of progress r the fall is in r / (r + usual), where 0.05 is about a fifth of r
    high: float
    alpha: float
    worse: bool  # a fall of 0 is bet away
    safe: bool  # a fall of the margin is bet away

    def __str__(self) -> str:
        digits, unit = (3, "") if self.figure == RATE else (4, " tokens/ms")
        before, after = ("-" if v is None else f"{v:.{digits}f}" for v in (self.predecessor, self.live))
        return (
            f"{self.figure} of {self.workload} ({self.policy}) {before} -> {after}{unit}, "
            f"fall {'' if self.figure == RATE else 'of r / (r + usual) '}[{self.low:.3f}, {self.high:.3f}], "
            f"{self.held} requests of the one and {self.others} of the other"
        )


@dataclass(frozen=True)
class Verdict:
    """What the watch says: "watching", "worse" (roll back), "safe" or "ended" (the holdback, or the canary, ends).

    Of a canary, `promote` says whether it becomes live: where it is safe; and where it has ended, if its acceptance
    rate is no lower than the live version's by the mean of the estimates d over all requests.
    """

    state: str
    reason: str
    findings: tuple[Finding, ...]
    promote: bool = False


def judge(
    observations: Sequence[Observation], share: float, config: WatchConfig, hours: float = 0.0, canary: bool = False
) -> Verdict:
    """The verdict on all requests so far, in the order in which they came; `hours` since the watch began."""
    findings = tuple(
        finding
        for place, group in enumerate(_groups(observations), start=1)
        for finding in _findings(group, share, config, config.watch_alpha / (place * (place + 1)))
    )
    worse = [f for f in findings if f.worse]
    if worse:
        clearest = max(worse, key=lambda f: f.low)
        before = "live version" if canary else "predecessor"
        return Verdict("worse", f"worse than the {before}: {clearest}, error rate {config.watch_alpha:g}", findings)
    if _safe(findings, observations, share, config):
        text = "; ".join(str(f) for f in findings if f.figure == RATE)
        return Verdict("safe", f"no fall of {config.watch_margin:g} or more: {text}", findings, promote=canary)
    most, longest = (
        (config.canary_requests, config.canary_hours) if canary else (config.watch_requests, config.watch_hours)
    )
    if len(observations) < most and hours < longest:
        return Verdict("watching", f"{len(observations)} requests so far", findings)
    found = "; ".join(str(f) for f in findings if f.figure == RATE) or "no requests"
    ended = Verdict("ended", f"after {len(observations)} requests no fall was shown, nor ruled out: {found}", findings)
    return _decided(ended, observations, share) if canary else ended


def _decided(ended: Verdict, observations: Sequence[Observation], share: float) -> Verdict:
    """A canary's time is over: what was seen decides, as nothing was proved."""
    fall = mean_fall(observations, share)
    if fall is None:
        return replace(ended, reason=f"{ended.reason}; one of the two versions served no request: not promoted")
    what = "not promoted" if fall > 0 else "promoted"
    return replace(
        ended, reason=f"{ended.reason}; estimated fall of the acceptance rate {fall:+.3f}: {what}", promote=fall <= 0
    )


def mean_fall(observations: Sequence[Observation], share: float) -> float | None:
    """The estimate of the fall of the acceptance rate over all requests; None where a version served none."""
    if len({one.held for one in observations}) < 2:
        return None
    total = 0.0
    for group in _groups(observations):
        held, rate = np.array([o.held for o in group]), np.array([o.accepted / o.proposed for o in group])
        total += float(falls(held, rate, share)[0].sum())
    return total / len(observations)


def falls(held: Bools, figures: Floats, share: float) -> tuple[Floats, Floats, Floats]:
    """Each request's estimate d [n] of the fall, and how far d may lie below and above 0 by what went before."""
    few = held if share <= 0.5 else ~held  # whose mean is guessed from the others' while there are few of them
    of_few, of_many = _mean_before(few, figures, ~few), _mean_before(~few, figures, None)
    before, after = (of_few, of_many) if share <= 0.5 else (of_many, of_few)
    guess = (1 - share) * before + share * after
    weight = np.where(held, 1 / share, -1 / (1 - share))
    below = np.maximum(guess / share, (1 - guess) / (1 - share))
    above = np.maximum((1 - guess) / share, guess / (1 - share))
    return weight * (figures - guess), below, above


def capital(d: Floats, below: Floats, fall: float) -> Floats:
    """Log of the capital [n] after each request, of a bet that the fall is more than `fall`."""
    logs = np.log1p(STAKES * ((d - fall) / (below + fall))).cumsum(axis=1)
    most = logs.max(axis=0)
    grown: Floats = most + np.log(np.exp(logs - most).mean(axis=0))
    return grown


def bet_away(d: Floats, below: Floats, fall: float, alpha: float) -> bool:
    """Whether, at any time so far, the capital said that the fall is more than `fall`."""
    return bool(len(d)) and float(capital(d, below, fall).max()) >= log(1 / alpha)


def lower_bound(d: Floats, below: Floats, alpha: float) -> float:
    """The largest fall that is bet away; -1 where none is. Capital falls with the fall it bets on."""
    low, high = -WIDEST, WIDEST
    if not bet_away(d, below, low, alpha):
        return -1.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if bet_away(d, below, middle, alpha) else (low, middle)
    return low


def _groups(observations: Sequence[Observation]) -> list[list[Observation]]:
    """By workload and policy, in the order in which these turned up."""
    groups: dict[tuple[str, str], list[Observation]] = {}
    for one in observations:
        groups.setdefault((one.workload, one.policy), []).append(one)
    return list(groups.values())


def _findings(group: Sequence[Observation], share: float, config: WatchConfig, alpha: float) -> list[Finding]:
    held = np.array([one.held for one in group])
    rate = np.array([one.accepted / one.proposed for one in group])
    progress = np.array([one.tokens / one.ms if one.ms > 0 else 0.0 for one in group])
    usual = _mean_before(np.ones_like(held), progress, None, first=float(progress[0]) or 1.0)
    scaled = progress / np.maximum(progress + usual, 1e-12)
    return [
        _finding(group, RATE, held, rate, rate, share, config, alpha / 2),
        _finding(group, PROGRESS, held, progress, scaled, share, config, alpha / 2),
    ]


def _finding(
    group: Sequence[Observation],
    figure: str,
    held: Bools,
    values: Floats,
    scaled: Floats,
    share: float,
    config: WatchConfig,
    alpha: float,
) -> Finding:
    d, below, above = falls(held, scaled, share)
    return Finding(
        workload=group[0].workload,
        policy=group[0].policy,
        figure=figure,
        held=int(held.sum()),
        others=int((~held).sum()),
        predecessor=float(values[held].mean()) if held.any() else None,
        live=float(values[~held].mean()) if not held.all() else None,
        low=lower_bound(d, below, alpha),
        high=-lower_bound(-d, above, alpha),
        alpha=alpha,
        worse=bet_away(d, below, 0.0, alpha),
        safe=bet_away(-d, above, -config.watch_margin, alpha),
    )


def _safe(findings: Sequence[Finding], observations: Sequence[Observation], share: float, config: WatchConfig) -> bool:
    """Every workload of weight is safe in both figures, and the smaller share was really served as it was meant to."""
    kept = [one.strayed for one in observations if one.held == (share <= 0.5)]
    if not kept or sum(kept) > STRAYED * len(kept):
        return False
    least = PROMINENT * len(observations)
    return all(f.safe for f in findings if f.held + f.others >= least)


def _mean_before(mask: Bools, values: Floats, fallback: Bools | None, first: float = 0.5) -> Floats:
    """Mean of the values under the mask before each place [n]; `fallback`'s mean counts as a few of them."""
    prior = np.full(len(values), first) if fallback is None else _mean_before(fallback, values, None, first)
    sums, counts = (np.concatenate([[0.0], np.cumsum(a)[:-1]]) for a in (np.where(mask, values, 0.0), mask * 1.0))
    mean: Floats = (sums + SHRINK * prior) / (counts + SHRINK)
    return mean
