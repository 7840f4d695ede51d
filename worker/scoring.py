"""Every drafter of a target on one window's requests: what routing learns from.

Each drafter is replayed as it was live when the window was collected, so none has been trained on these requests, and
all are scored on the same ones. The target is not called, but for the hidden states that some kinds are conditioned on.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import structlog
from torch import Tensor

from adapter.drafters.learnt import LearntDrafter
from adapter.replay import Floats, matches, overlaps, row_weights
from adapter.routing import Scored
from adapter.versions import Versions, WeightsRefused
from storage.records import FeedbackRecord
from storage.registry import Drafter, Registry, Version
from storage.weights import BlobDamaged
from storage.windows import Window
from worker.rescoring import Rescorer

log = structlog.get_logger()


@dataclass(frozen=True)
class As:
    """A drafter as one of its versions."""

    drafter: Drafter
    version: Version


def as_it_was(registry: Registry, drafters: Iterable[Drafter], window: Window) -> dict[str, As]:
    """By name: the drafters that were there when the window was collected, with the version that was live then."""
    found = [(drafter, registry.live_at(drafter.name, window.created_at)) for drafter in drafters]
    return {drafter.name: As(drafter, version) for drafter, version in found if version is not None}


def score(
    records: Sequence[FeedbackRecord],
    drafters: Mapping[str, As],
    served: str,
    weights: Versions,
    rescorer: Rescorer | None = None,
) -> tuple[list[Scored], dict[str, int]]:
    """Each request with every drafter's acceptance probability, in the order of time; and the versions replayed.

    `served` is the drafter whose rounds the window's requests are: rows that were logged at its rejections only stand
    for others by how likely those were (`adapter/replay`). A drafter that cannot be replayed is left out; nothing is
    scored without the one that served.
    """
    ordered = sorted(records, key=lambda record: record.finished_at)
    found = {name: _replayed(one, ordered, weights, rescorer) for name, one in drafters.items()}
    values = {name: by_record for name, by_record in found.items() if by_record is not None}
    if served not in values:
        return [], {}
    requests = [
        _scored(record, {name: by_record[number] for name, by_record in values.items()}, served)
        for number, record in enumerate(ordered)
    ]
    versions = {name: drafters[name].version.number for name in values}
    return [request for request in requests if request is not None], versions


def _scored(record: FeedbackRecord, values: Mapping[str, Floats | None], served: str) -> Scored | None:
    """One request with its acceptance probabilities; None where the serving drafter has none."""
    base = values[served]
    if base is None:
        return None
    weight = np.ones(len(base)) if record.greedy else row_weights(record, base)
    means = {name: float(weight @ found / weight.sum()) for name, found in values.items() if found is not None}
    return Scored(record.workload, "greedy" if record.greedy else "sampled", means)


def _replayed(
    one: As, records: Sequence[FeedbackRecord], weights: Versions, rescorer: Rescorer | None
) -> list[Floats | None] | None:
    """By record: the drafter's acceptance probabilities by position. None where the drafter cannot be had."""
    try:
        model = weights.load(one.version, one.drafter)
    except (BlobDamaged, WeightsRefused) as error:
        log.warning("routing.not_scored", drafter=one.drafter.name, version=one.version.number, reason=str(error))
        return None
    hidden: Mapping[str, Tensor] = {}
    if model.taps:
        if rescorer is None:
            return None
        hidden = rescorer.read(records, model.taps).hidden
    return [_probabilities(model, record, hidden.get(record.record_id)) for record in records]


def _probabilities(model: LearntDrafter, record: FeedbackRecord, hidden: Tensor | None) -> Floats | None:
    """Greedy: whether each token but the first, which no round proposes, is the drafter's choice; else its overlaps."""
    if model.taps and hidden is None:
        return None
    if record.greedy:  # under penalties, a bias or a grammar the text does not say what the target would choose
        usable = record.exact and len(record.output) > 1
        return matches(model, record, hidden)[1:].astype(np.float64) if usable else None
    return overlaps(model, record, hidden) if record.teacher.positions else None
