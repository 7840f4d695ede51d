"""One window, every drafter: greedy and sampled requests as replay scores them, and kinds that need hidden states."""

from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest
import torch

from adapter.drafters.causal_lm import CausalLM
from adapter.drafters.kinds import Sizes, first_version
from adapter.drafters.learnt import LearntDrafter
from adapter.replay import compare
from adapter.rescore import RescoreConfig
from adapter.sample import answers
from adapter.target import Target
from adapter.versions import Versions
from storage.records import FeedbackRecord, int32
from storage.registry import Drafter, Version
from storage.weights import WeightsStore
from tests.adapter.feedback import served
from tests.circle import tiny_first
from tests.service.engine.oracle import random_prompt
from worker.rescoring import Rescorer
from worker.scoring import As, score

NOW = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.fixture
def weights(target: Target, tmp_path: Path) -> Versions:
    return Versions(WeightsStore(tmp_path), target.files, target.embedding)


@pytest.fixture
def general(target: Target) -> CausalLM:
    return tiny_first(target)


@pytest.fixture
def other(target: Target) -> CausalLM:
    return CausalLM.from_target(target.model, 2, torch.arange(200))


@pytest.fixture
def texts(target: Target, general: CausalLM) -> list[FeedbackRecord]:
    """Requests that the general drafter was proposing for, with rows where it was refused."""
    prompts = [random_prompt(target, n, 6) for n in range(4)]
    return [
        msgspec.structs.replace(served(general, answer), record_id=f"r{n}", finished_at=float(n))
        for n, answer in enumerate(answers(target, prompts, 20, top_k=16))
    ]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_each_drafter_has_the_probability_that_replay_gives_it(
    weights: Versions,
    target: Target,
    general: CausalLM,
    other: CausalLM,
    texts: list[FeedbackRecord],
    temperature: float,
) -> None:
    records = [msgspec.structs.replace(text, temperature=temperature) for text in texts]
    drafters = {"general": saved(weights, target, "general", general), "other": saved(weights, target, "other", other)}
    found, versions = score(records[::-1], drafters, "general", weights)
    assert versions == {"general": 3, "other": 3}
    pairs = [compare(other, general, record, k=1) for record in records]  # by time, though they came otherwise
    assert len(found) == len(records)
    for request, pair in zip(found, pairs, strict=True):
        assert pair is not None
        assert request.policy == pair.policy == ("sampled" if temperature else "greedy")
        assert request.probabilities["other"] == pytest.approx(pair.candidate / pair.weight)
        assert request.probabilities["general"] == pytest.approx(pair.parent / pair.weight)


def test_requests_that_say_nothing_are_passed_over(
    weights: Versions, target: Target, general: CausalLM, texts: list[FeedbackRecord]
) -> None:
    empty = msgspec.structs.replace(texts[0].teacher, positions=b"", ids=b"", log_probs=b"", tail_log_mass=b"")
    records = [
        msgspec.structs.replace(texts[0], adjusted=True),
        msgspec.structs.replace(texts[1], output_ids=int32([7])),
        msgspec.structs.replace(texts[2], temperature=0.8, teacher=empty),
    ]
    assert score(records, {"general": saved(weights, target, "general", general)}, "general", weights)[0] == []


def test_without_the_drafter_that_served_nothing_is_scored(
    weights: Versions, target: Target, other: CausalLM, texts: list[FeedbackRecord]
) -> None:
    assert score(texts, {"other": saved(weights, target, "other", other)}, "general", weights) == ([], {})


@pytest.mark.parametrize("kind", ["medusa", "eagle"])
def test_a_kind_that_needs_hidden_states_is_scored_where_the_target_gives_them(
    weights: Versions, target: Target, general: CausalLM, texts: list[FeedbackRecord], kind: str
) -> None:
    conditioned = first_version(kind, target.model, weights.shared, torch.arange(200), Sizes())
    drafters = {
        "general": saved(weights, target, "general", general),
        kind: saved(weights, target, kind, conditioned),
    }
    without, versions = score(texts, drafters, "general", weights)
    assert list(versions) == ["general"]
    assert all(list(request.probabilities) == ["general"] for request in without)
    rescorer = Rescorer(lambda dtype: target, RescoreConfig())
    found, versions = score(texts, drafters, "general", weights, rescorer)
    assert set(versions) == {"general", kind}
    assert all(0.0 <= request.probabilities[kind] <= 1.0 for request in found)
    assert [request.probabilities["general"] for request in found] == [
        request.probabilities["general"] for request in without
    ]


def saved(weights: Versions, target: Target, name: str, model: LearntDrafter) -> As:
    """A drafter of the registry, as version 3."""
    blob, files = weights.save(model), target.files
    drafter = Drafter(
        1, name, model.kind, files.fingerprint, files.tokenizer_fingerprint, model.config.to_dict(), NOW, None
    )  # fmt: skip
    return As(drafter, Version(1, name, 3, None, blob.sha256, blob.size, NOW, None))
