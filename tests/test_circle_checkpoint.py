"""The circle with a drafter that is an existing checkpoint, of another width and head size than the target."""

from pathlib import Path

import pytest
from sqlalchemy import Engine as Database

from adapter.drafters.causal_lm import CausalLM
from adapter.target import Target
from tests.adapter.test_causal_lm import save_family
from tests.circle import LEARNING, running_circle, tiny_prompts
from tests.valkey_fixture import ValkeyServer


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_an_existing_checkpoint_is_served_learns_goes_live_and_is_taken_back(
    target: Target, engine: Database, valkey: ValkeyServer, tmp_path: Path, family: str
) -> None:
    path = save_family(tmp_path / "checkpoint", target.vocab_size + 64, family)
    first = CausalLM.from_checkpoint(path, target.files, vocab_size=target.vocab_size)
    with running_circle(target, engine, valkey.url, tmp_path, first, LEARNING) as circle:
        before = circle.send(tiny_prompts(target, 48))
        (job,) = circle.housekeeper.sweep()
        decision = circle.adapt(circle.stores(job))
        assert decision is not None
        assert decision.promote, decision.reason
        circle.check_learned(before)
        served = circle.versions.load(circle.registry.version("demo", 2), circle.drafter)
        assert served.own_tensors().keys() == first.own_tensors().keys()
        assert "decoder.embed_tokens.weight" in served.own_tensors()

        circle.check_taken_back()
