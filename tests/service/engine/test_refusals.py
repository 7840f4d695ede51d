"""Acceptance probabilities out of rows that were logged at refusals alone: what proposed makes no difference to them.

The truth is the same requests' verified positions, all of them, as the target scores them again. The engine's
seeds are the system's: the estimates lie some four standard errors within their bounds.
"""

from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from adapter.drafters.causal_lm import CausalLM
from adapter.policy import Policy
from adapter.replay import overlaps, row_weights
from adapter.rescore import rescore
from adapter.target import Target
from service.origin import Origin
from service.recording import record_of
from storage.records import FeedbackRecord
from tests.service.engine.oracle import ask, first_layers, running
from tests.service.engine.small import PROMPT, small_target

POLICY = Policy(1.0)
FORMS: dict[str, dict[str, Any]] = {
    "chain": {"draft_length": 2},
    "tree": {"draft_length": 3, "tree_nodes": 7},
    "ngram": {"draft_length": 2, "fallback": "ngram"},
    "ngram_tree": {"draft_length": 3, "tree_nodes": 7, "fallback": "ngram"},
}


@pytest.fixture(scope="module")
def small(target: Target) -> Target:
    return small_target(target, 64)  # with six tokens a tree's children leave nothing to refuse


def served(target: Target, drafter: CausalLM, form: str) -> list[FeedbackRecord]:
    """Sampled requests of 40 tokens; n-grams propose where no drafter is live."""
    proposing = None if form.startswith("ngram") else drafter
    with running(target, proposing, slots=16, context=64, waiting=200, **FORMS[form]) as engine:
        clients = [ask(engine, PROMPT, 40, POLICY) for _ in range(160)]
        for client in clients:
            client.wait()
    return [record_of(client.generation, Origin("t", "k", "d")) for client in clients]


def verified(record: FeedbackRecord) -> list[int]:
    """Output positions that some proposal was verified at."""
    return [r.start + at for r in record.rounds for at in range(min(r.accepted + 1, r.proposed))]


def estimated(drafter: CausalLM, records: list[FeedbackRecord]) -> float:
    """The mean overlap at verified positions, from the rows at refusals."""
    sums = np.zeros(2)
    for record in records:
        rounds = [r.start + r.accepted for r in record.rounds if r.accepted < r.proposed]
        at_refusals = msgspec.structs.replace(record, teacher=record.teacher.at(rounds))
        if at_refusals.teacher.positions:
            found = overlaps(drafter, at_refusals)
            weights = row_weights(at_refusals, found)
            sums += weights @ found, weights.sum()
    return float(sums[0] / sums[1])


def true(target: Target, drafter: CausalLM, records: list[FeedbackRecord]) -> float:
    found = []
    for read in rescore(target, records, ()):
        by_position = overlaps(drafter, read.record)
        positions = read.record.teacher.arrays()[0].tolist()
        found += [by_position[positions.index(at)] for at in verified(read.record)]
    return float(np.mean(found))


@pytest.mark.parametrize("form", FORMS)
def test_rows_at_refusals_stand_for_all_verified_positions(small: Target, form: str) -> None:
    drafter = first_layers(small, layers=1, seed=5)
    with torch.no_grad():
        drafter.head.weight *= 1.5
    records = served(small, drafter, form)
    assert all(record.teacher.refusals for record in records if record.teacher.positions)
    truth = true(small, drafter, records)
    assert estimated(drafter, records) == pytest.approx(truth, abs=0.03)
    if form.startswith("ngram"):
        unknown = [
            msgspec.structs.replace(r, teacher=msgspec.structs.replace(r.teacher, refusals=b"")) for r in records
        ]
        assert abs(estimated(drafter, unknown) - truth) > 0.1
