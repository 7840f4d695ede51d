"""The circle with drafters that are conditioned on hidden states: they are served, taught, judged and swapped alike."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from sqlalchemy import Engine as Database

from adapter.rescore import RescoreConfig
from adapter.target import Target
from storage.registry import Registry
from tests.adapter.conditioned import CONDITIONED, first
from tests.circle import LEARNING, running_circle, tiny_prompts
from tests.valkey_fixture import ValkeyServer
from worker.rescoring import Rescorer


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
@pytest.mark.parametrize("kind", CONDITIONED)
def test_a_drafter_of_any_kind_learns_from_its_traffic_goes_live_and_is_taken_back(
    target: Target, engine: Database, valkey: ValkeyServer, tmp_path: Path, kind: str
) -> None:
    drafter = first(target, kind, depths=4, tokens=torch.arange(200))
    with running_circle(target, engine, valkey.url, tmp_path, drafter, LEARNING) as circle:
        before = circle.send(tiny_prompts(target, 48))
        (job,) = circle.housekeeper.sweep()
        rescorer = Rescorer(lambda dtype: target, RescoreConfig(rescore_share=1.0))
        decision = circle.adapt(replace(circle.stores(job), rescorer=rescorer))
        assert decision is not None
        assert decision.promote, decision.reason
        circle.check_learned(before)
        version = Registry(engine).version("demo", 2)
        run = circle.registry.training(version)
        assert run is not None
        assert run.teacher == "rescored"
        assert circle.versions.load(version, circle.drafter).kind == kind

        circle.check_taken_back()
