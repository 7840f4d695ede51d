"""Decoders of other families than Llama, with random weights: the engine's slots suit any standard attention."""

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPTNeoXConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from adapter.drafters.causal_lm import CausalLM
from adapter.packing import pack
from adapter.target import Target
from service.engine.reach import NotServed, Reach
from tests import tiny
from tests.service.engine.oracle import ask, plain_greedy, random_prompt, running

SHAPE = {**tiny.SHAPE, "max_position_embeddings": 256, "initializer_range": 0.3, "pad_token_id": 0}
GROUPED = {**SHAPE, "num_key_value_heads": 2, "head_dim": 8}
FAMILIES = {
    "qwen2": Qwen2Config(**GROUPED),
    "qwen2_sliding": Qwen2Config(**GROUPED, use_sliding_window=True, sliding_window=12, max_window_layers=1),
    "qwen3": Qwen3Config(**GROUPED),
    "gpt_neox": GPTNeoXConfig(**SHAPE),
    "mistral_sliding": MistralConfig(**GROUPED, sliding_window=12),
    "gemma2": Gemma2Config(**GROUPED, sliding_window=12, query_pre_attn_scalar=8),
    "gemma3": Gemma3TextConfig(**GROUPED, sliding_window=12, query_pre_attn_scalar=8),
}


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest, target: Target) -> Target:
    """A target of another family, with the tiny target's tokenizer."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(FAMILIES[request.param]).float().eval().requires_grad_(False)
    pack(model)
    return Target(**{**vars(target), "model": model, "context": 256})


def test_speculative_and_batched_output_equals_plain_output(family: Target) -> None:
    """Prompts on both sides of the sliding window; the drafter is the target's own first layer."""

    drafter = CausalLM.from_target(family.model, 1, torch.arange(family.vocab_size))
    prompts = [random_prompt(family, seed, length) for seed, length in enumerate((3, 11, 40))]
    with running(family, drafter, slots=3) as engine:
        clients = [ask(engine, prompt, max_tokens=30) for prompt in prompts]
        outputs = [client.wait() for client in clients]
        rounds = [r for client in clients for r in client.usage.rounds]
    assert outputs == [plain_greedy(family, prompt, 30) for prompt in prompts]
    assert 0 < sum(r.accepted for r in rounds) < sum(r.proposed for r in rounds)


def test_layers_that_keep_no_keys_and_values_are_refused() -> None:
    config = Qwen3Config(**GROUPED)
    config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(NotServed, match="linear_attention are not served"):
        Reach(config, torch.device("cpu"), torch.float32)
