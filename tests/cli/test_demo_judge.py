"""The demo's replay of versions of every kind over plain outputs."""

import pytest
import torch

from adapter.drafters.kinds import KINDS, Sizes, first_version
from adapter.drafters.shared import Shared
from adapter.sample import answers
from adapter.target import Target
from adapter.versions import Versions
from cli.demo.comparison import Judge
from cli.demo.traffic import Answer
from storage.registry import Registry
from storage.weights import WeightsStore
from tests.tiny import TEXT


@pytest.mark.parametrize("kind", KINDS)
def test_the_acceptance_probability_of_each_kind_is_a_share_of_all_positions(
    kind: str, target: Target, registry: Registry, store: WeightsStore
) -> None:
    shared = Shared(target.embedding, target.files)
    made = first_version(kind, target.model, shared, torch.arange(target.vocab_size), Sizes(layers=3))
    versions, files = Versions(store, target.files, target.embedding), target.files
    blob = versions.save(made)
    registry.create_drafter(
        "demo", kind, files.fingerprint, files.tokenizer_fingerprint, made.config.to_dict(), blob.sha256, blob.size, "t"
    )
    prompts = [target.tokenizer(text)["input_ids"] for text in TEXT[:2]]
    plain = [
        Answer("w", record.prompt.tolist(), record.output.tolist(), 1.0, None, 0, 0, 0)
        for record in answers(target, prompts, 6)
    ]
    probability = Judge(target, versions, registry.drafter("demo")).probability(registry.live("demo"), plain)
    if kind == "causal_lm":
        assert probability == 1.0, "all of the target's layers and tokens: the target itself"
    assert 0.0 <= probability <= 1.0
