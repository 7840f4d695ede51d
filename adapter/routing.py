"""Which drafter of a target should propose for which workload: pure decisions over weights. No torch here.

Learned with full information (HedgeSpec, Liu et al., arXiv 2510.20064, sections 2 and 3): every drafter is replayed on
the same logged text (`worker/routing`), so each request gives each drafter a loss, not only the one that served it, and
nothing has to be explored. A drafter's loss on a request is 1 - (acceptance probability - cost of its draft step in
target steps): a proposed token wins `probability` tokens and costs `cost` target passes, so speculation pays at all
only where the difference is positive (Leviathan et al., arXiv 2211.17192, section 3.4).

The weights are Hedge's (Freund and Schapire, 1997) with a fixed share, so that they follow a change (Herbster and
Warmuth, "Tracking the best expert", 1998). For losses in [0, 1], N drafters, T requests and any sequence of drafters
that changes m times, the weights' loss exceeds the loss of that sequence by at most

    ((m + 1) ln N + m ln(1/share) + (T - m - 1) ln(1/(1 - share))) / rate + rate T / 8

(Cesa-Bianchi and Lugosi, "Prediction, Learning, and Games", 2006, theorem 5.2; m = 0 and share = 0 is theorem 2.2).
A drafter without a loss on some request sleeps: it is given the loss of the others' mixture (Freund et al., 1997).

A workload is routed to one drafter, not to a mixture. The route changes only where another drafter's weight is ODDS
times that of the serving one, and would change back only at the same odds the other way. So the bound is the weights',
not the route's: on top of it, a change of the best drafter costs about (ln(N / share) + ln ODDS) / rate, the loss of 33
whole requests for two drafters, until the route follows. By simulation (tests/adapter/test_routing.py) of drafters
whose losses on a request differ by 0.1 in the standard deviation: between equally good ones the route did not change in
200,000 requests; one that is better by 0.1 is found after 80 requests in the median, by 0.05 after 180, by 0.03 after
320, by 0.02 after 550, and kept; a difference of 0.005 is not followed, and changes the route once in 25,000.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from math import exp, log, sqrt
from typing import Literal

from storage.config import setting
from storage.standings import Score, Standing

RATE = 0.3  # of learning, per request
SHARE = 0.001  # of the weight that is dealt out anew at each request: a change is expected every 1,000 requests or so
ODDS = 9.0  # of another drafter against the serving one, at which the route changes
MEMORY = 500.0  # requests that a drafter's acceptance probability goes back
GAP = 0.1  # of acceptance probability below the other workloads, at which a workload is worth a drafter of its own
ERRORS = 3.0  # standard errors that the gap must be wide as well
NAME = 40  # characters of a workload's label in the name of its own drafter


@dataclass(frozen=True)
class RoutingConfig:
    """Several drafters for one target, by workload."""

    routing: Literal["off", "label", "learned"] = setting(
        "label",
        "off: the general drafter proposes for every workload; label: routes set with `redraft route` are followed; "
        "learned: the trainer routes workloads as well, and makes drafters for those that need one. A routed workload "
        "trains its own drafter only",
    )
    routing_requests: int = setting(200, "scored requests of a workload before the trainer routes it")
    routing_share: float = setting(0.05, "least share of the traffic that is worth a drafter of its own")
    routing_drafters: int = setting(4, "drafters that routing makes for a target at most")
    routing_silence_hours: float = setting(24.0, "hours without a workload's requests after which its drafter goes")
    routing_seconds: float = setting(30.0, "interval of scoring drafters on new windows")


@dataclass(frozen=True)
class Scored:
    """One request, as the drafters would have done on it; those that could not be scored are missing."""

    workload: str
    policy: str  # "greedy" or "sampled": different measurements, never averaged together
    probabilities: Mapping[str, float]  # acceptance probability by drafter


@dataclass(frozen=True)
class Choice:
    """The drafter that a workload should have, and why in a sentence."""

    drafter: str
    reason: str


def loss(probability: float, cost: float = 0.0) -> float:
    """In [0, 1]; `cost` is the time of a draft step in target steps."""
    return min(1.0, max(0.0, 1.0 - (probability - cost)))


def followed(
    weights: Mapping[str, float], losses: Mapping[str, float], rate: float = RATE, share: float = SHARE
) -> dict[str, float]:
    """The weights after one more request: Hedge's update, then the fixed share. They sum to 1."""
    awake = sum(weights[name] for name in losses)
    left = {name: weights[name] * exp(-rate * value) for name, value in losses.items()}
    mixture = sum(left.values()) / awake if awake > 0 else 1.0
    updated = {name: left.get(name, weight * mixture) for name, weight in weights.items()}
    total = sum(updated.values())
    return {name: (1 - share) * weight / total + share / len(updated) for name, weight in updated.items()}


def mixed(weights: Mapping[str, float], losses: Mapping[str, float]) -> float:
    """The weights' own loss on a request: what the bound is about."""
    return sum(weights[name] * value for name, value in losses.items())


def bound(drafters: int, requests: int, changes: int = 0, rate: float = RATE, share: float = SHARE) -> float:
    """The most that the weights can lose on the best sequence of drafters with so many changes (see above)."""
    switched = changes * log(1 / share) if changes else 0.0
    stayed = (requests - changes - 1) * log(1 / (1 - share))
    return ((changes + 1) * log(drafters) + switched + stayed) / rate + rate * requests / 8


def entered(weights: Mapping[str, float], drafters: Collection[str]) -> dict[str, float]:
    """The weights of exactly these drafters: new ones get an equal part, the others keep their proportions."""
    kept = {name: weights[name] for name in drafters if weights.get(name, 0.0) > 0.0}
    total, size = sum(kept.values()), len(drafters)
    return {name: kept[name] / total * len(kept) / size if name in kept else 1 / size for name in sorted(drafters)}


def revised(
    standings: Mapping[str, Standing],
    requests: Sequence[Scored],
    versions: Mapping[str, int],
    costs: Mapping[str, float],
) -> dict[str, Standing]:
    """One workload's standings, by drafter, after some more requests of it.

    `versions` are the numbers that were replayed; drafters that are new enter with these requests.
    """
    weights = entered({name: standing.weight for name, standing in standings.items()}, {*standings, *versions})
    found = {name: standings[name] if name in standings else Standing(versions[name], 0.0, {}, 0) for name in weights}
    for request in requests:
        scored = {name: p for name, p in request.probabilities.items() if name in weights}
        if scored:
            weights = followed(weights, {name: loss(p, costs.get(name, 0.0)) for name, p in scored.items()})
        for name, probability in scored.items():
            found[name] = _counted(found[name], request.policy, probability, versions[name])
    return {name: replace(standing, weight=weights[name]) for name, standing in found.items()}


def _counted(standing: Standing, policy: str, probability: float, version: int) -> Standing:
    scores = {**standing.scores, policy: averaged(standing.scores.get(policy), probability)}
    return replace(standing, version=version, scores=scores, scored=standing.scored + 1)


def averaged(score: Score | None, value: float) -> Score:
    """A mean and variance over the last MEMORY requests or so."""
    if score is None:
        return Score(1.0, value, 0.0)
    requests = min(score.requests + 1, MEMORY)
    mean = score.mean + (value - score.mean) / requests
    variance = score.variance + ((value - score.mean) * (value - mean) - score.variance) / requests
    return Score(requests, mean, variance)


def choice(standings: Mapping[str, Standing], serving: str, general: str) -> Choice | None:
    """The drafter that the workload should go to; None where it stays with the serving one.

    Another drafter must have ODDS times the serving one's weight. The general drafter is the floor: what does not beat
    it at the same odds is not routed to.
    """
    if serving not in standings or general not in standings:
        return None
    best = max(sorted(standings), key=lambda name: standings[name].weight)
    if standings[best].weight < ODDS * standings[general].weight:
        best = general
    if best == serving or standings[best].weight < ODDS * standings[serving].weight:
        return None
    ours, theirs = standings[best], standings[serving]
    reason = (
        f"weight {ours.weight:.3f} against {theirs.weight:.3f} of {serving} after {ours.scored} requests; acceptance "
        f"probability {said(ours)} against {said(theirs)}"
    )
    return Choice(best, reason)


def lagging(workload: str, general: Mapping[str, Standing]) -> str:
    """Why the general drafter is clearly worse on this workload than on the others that it serves; "" where it is not.

    `general` is its standing by workload. Compared within the policy that most requests of the workload have.
    """
    own = general[workload].scores
    if not own:
        return ""
    policy = max(own, key=lambda name: (own[name].requests, name))
    here = own[policy]
    others = [s.scores[policy] for name, s in general.items() if name != workload and policy in s.scores]
    requests = sum(score.requests for score in others)
    if requests == 0:
        return ""
    elsewhere = sum(score.mean * score.requests for score in others) / requests
    error = sqrt(here.variance / here.requests + sum(score.variance * score.requests for score in others) / requests**2)
    gap = elsewhere - here.mean
    if gap < GAP or gap < ERRORS * error:
        return ""
    return (
        f"acceptance probability of the general drafter is {here.mean:.3f} on {workload} and {elsewhere:.3f} on the "
        f"other workloads ({policy}; {here.requests:.0f} and {requests:.0f} requests, standard error {error:.3f})"
    )


def own_name(general: str, workload: str, taken: Collection[str]) -> str:
    """A name that no drafter has for the one that a workload gets for its own."""
    plain = "".join(c if c.isascii() and (c.isalnum() or c in "-_.") else "-" for c in workload.lower())[:NAME]
    stem = f"{general}--{plain}"
    return next(name for n in count(1) if (name := stem if n == 1 else f"{stem}-{n}") not in taken)


def said(standing: Standing) -> str:
    """Acceptance probability by policy, for a reason."""
    return ", ".join(f"{score.mean:.3f} ({policy})" for policy, score in sorted(standing.scores.items())) or "unknown"
