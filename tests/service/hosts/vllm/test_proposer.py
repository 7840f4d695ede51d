"""The class that vLLM is given: whatever goes wrong in redraft, vLLM hears of no error and gets no proposal.

vLLM is not installed where these run: the few modules that are looked up stand in for it. The real ones are in
`make test-vllm`.
"""

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from service.hosts.vllm import Proposer
from service.hosts.vllm.expansion import NAME, expanded
from tests.service.hosts.vllm.engine import Asked, Engine


class Runner:
    """As `GPUModelRunner`: told of each step before it changes anything."""

    def _update_states(self, scheduled: Any) -> str:
        return "updated"


@pytest.fixture(autouse=True)
def vllm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> SimpleNamespace:
    """What of vLLM a proposer looks up."""
    runner = type("GPUModelRunner", (Runner,), {"_update_states": Runner._update_states})
    made = {
        "vllm": {"__version__": "0.32.0"},
        "vllm.distributed": {"get_tensor_model_parallel_rank": lambda: 0},
        "vllm.v1": {}, "vllm.v1.sample": {}, "vllm.v1.worker": {},
        "vllm.v1.sample.rejection_sampler": {NAME: expanded},
        "vllm.v1.worker.gpu_model_runner": {"GPUModelRunner": runner},
    }  # fmt: skip
    for name, members in made.items():
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    for name in ("HOME", "CACHE"):
        monkeypatch.setenv(f"REDRAFT_{name}", str(tmp_path))
    return SimpleNamespace(runner=runner)


def config(model: str = "/nowhere") -> SimpleNamespace:
    return SimpleNamespace(
        device_config=SimpleNamespace(device=torch.device("cpu")),
        scheduler_config=SimpleNamespace(max_num_seqs=4, max_num_batched_tokens=256),
        speculative_config=SimpleNamespace(num_speculative_tokens=3),
        model_config=SimpleNamespace(
            model=model, dtype=torch.float32, max_model_len=128, get_vocab_size=lambda: 320
        ),
    )  # fmt: skip


def test_it_is_told_of_the_steps_of_its_own_runner_and_runners_do_as_before(vllm: SimpleNamespace) -> None:
    proposer, other = Proposer(config()), Proposer(config())
    runner = vllm.runner()
    runner.drafter, runner.input_batch, runner.requests = proposer, SimpleNamespace(req_ids=["r"]), {}
    scheduled = SimpleNamespace(finished_req_ids=set(), scheduled_new_reqs=[], scheduled_spec_decode_tokens={})
    assert runner._update_states(scheduled) == "updated"
    assert proposer._core is not None
    assert proposer._core._step is not None
    assert other._core is not None
    assert other._core._step is None


def test_settings_that_cannot_be_used_leave_vllm_without_proposals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDRAFT_KV_MEMORY", "plenty")
    proposer = Proposer(config())
    proposer.load_model(object())
    assert proposer.propose([[1], [2]], np.array([3, 3]), np.zeros((2, 8), dtype=np.int32)) == [[], []]
    proposer.close()


def test_without_a_target_or_a_drafter_it_goes_on_without_proposals() -> None:
    proposer = Proposer(config())
    proposer.load_model(object())
    assert proposer.propose([[1]], np.array([3]), np.zeros((1, 8), dtype=np.int32)) == [[]]
    proposer.close()


def test_what_makes_no_sense_is_a_fault_that_is_counted_and_not_raised() -> None:
    proposer = Proposer(config())
    assert proposer.propose([[1]], None, None) == [[]]
    assert proposer.propose([[1], []], None, None) == [[], []]
    assert proposer._core is not None
    assert proposer._core.faults == {"propose: TypeError": 2}


def test_a_runner_that_keeps_its_rows_elsewhere_is_proposed_for_and_not_recorded(vllm: SimpleNamespace) -> None:
    proposer = Proposer(config())
    runner = vllm.runner()
    runner.drafter = proposer
    assert runner._update_states(SimpleNamespace()) == "updated"
    assert proposer._core is not None
    assert proposer._core.faults == {"step: AttributeError": 1}
    assert proposer.propose([[1]], np.array([3]), np.zeros((1, 8), dtype=np.int32)) == [[]]


def test_a_worker_that_vllm_asks_for_no_proposals_makes_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["vllm.distributed"], "get_tensor_model_parallel_rank", lambda: 1)
    proposer = Proposer(config())
    proposer.load_model(object())
    assert proposer._core is None
    assert proposer.propose([[1]], np.array([3]), np.zeros((1, 8), dtype=np.int32)) == [[]]


def test_n_grams_propose_by_themselves_where_they_are_the_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDRAFT_FALLBACK", "ngram")
    monkeypatch.setenv("REDRAFT_GOVERNOR", "false")
    proposer = Proposer(config())
    assert proposer._core is not None
    line = [5, 9, 14, 20]
    engine = Engine(rows=2, context=128)
    asked = engine.submit(Asked("r", line * 3, line * 6, 16))
    engine.run(proposer._core.begins, lambda *step: proposer.propose(*step))
    assert asked.output == line * 4
    assert sum(played.accepted for played in asked.rounds) > 8
