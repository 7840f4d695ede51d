"""A drafter as a Hugging Face checkpoint: loaded by transformers, it proposes what it did, and nothing else."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from adapter.drafters.causal_lm import CausalLM, CausalLMConfig
from adapter.drafters.kinds import Sizes, first_version
from adapter.drafters.learnt import DrafterRefused
from adapter.drafters.shared import Shared
from adapter.export import hf
from adapter.export.plain import HEAD, AlreadyThere, plain
from adapter.target import Target, load_embedding
from tests import tiny
from tests.tiny import tiny_target_dir

EVERY_THIRD = torch.arange(0, 300, 3)
TOKENS = torch.randint(0, 320, (4, 30), generator=torch.Generator().manual_seed(3))
SHAPE = {**tiny.SHAPE, "num_hidden_layers": 3, "num_key_value_heads": 2, "initializer_range": 0.3}
FAMILIES = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, rms_norm_eps=1e-5)),
    "llama with biases": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=None)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SHAPE)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=16)),
}


def loaded(drafter: CausalLM, target: Target, folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """Through the files, in that dtype."""
    hf.write(drafter, target.files, folder, dtype)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def random_biases(model: Any) -> Any:
    """Models are made with biases of zero, which would show nothing."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("bias"):
                weight.normal_()
            elif "norm" in name:
                weight.uniform_(0.5, 1.5)
    return model


@torch.no_grad()
def both(drafter: CausalLM, model: Any) -> tuple[Tensor, Tensor]:
    """Logits of the drafter [4, 30, V_d], and of what was exported [4, 30, V]."""
    own: Tensor = drafter.logits(drafter.hidden(TOKENS))
    return own, model(TOKENS).logits


def assert_proposes_the_same(drafter: CausalLM, model: Any) -> None:
    """The same argmax everywhere, the same q over the draft vocabulary, and exactly none outside it."""
    own, full = both(drafter, model)
    outside = drafter.target_to_draft < 0
    q = full.softmax(-1)
    assert float(q[..., outside].max()) == 0.0
    torch.testing.assert_close(q[..., ~outside], own.softmax(-1), rtol=1e-3, atol=1e-6)
    assert torch.equal(full.argmax(-1), drafter.draft_to_target[own.argmax(-1)])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_reduced_vocabulary_is_spread_over_all_tokens_without_changing_what_is_proposed(
    family: str, target: Target, tmp_path: Path
) -> None:
    torch.manual_seed(1)
    drafter = CausalLM.from_target(random_biases(FAMILIES[family]()), 2, EVERY_THIRD)
    assert_proposes_the_same(drafter, loaded(drafter, target, tmp_path / "out"))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_drafter_of_all_tokens_keeps_its_width(family: str, target: Target, tmp_path: Path) -> None:
    torch.manual_seed(1)
    drafter = CausalLM.from_target(random_biases(FAMILIES[family]()), 2, torch.randperm(320))
    model = loaded(drafter, target, tmp_path / "out")
    assert model.config.hidden_size == 32
    own, full = both(drafter, model)
    torch.testing.assert_close(full[..., drafter.draft_to_target], own, rtol=1e-4, atol=1e-4)


def test_a_token_outside_never_wins_even_where_all_inside_are_very_unlikely(target: Target, tmp_path: Path) -> None:
    drafter = CausalLM.from_target(target.model, 2, EVERY_THIRD)
    with torch.no_grad():
        drafter.head.weight.mul_(100)
    own, full = both(drafter, loaded(drafter, target, tmp_path / "out"))
    outside = drafter.target_to_draft < 0
    assert float(own.min()) < -300
    assert bool((full[..., outside].amax(-1) < full[..., ~outside].amin(-1)).all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_16_bits_the_tokens_outside_stay_silent_and_the_rest_is_only_rounded(
    dtype: torch.dtype, target: Target, tmp_path: Path
) -> None:
    drafter = CausalLM.from_target(target.model, 2, EVERY_THIRD)
    model = loaded(drafter, target, tmp_path / "out", dtype)
    own, full = both(drafter, model)
    outside = drafter.target_to_draft < 0
    q = full.float().softmax(-1)
    assert float(q[..., outside].max()) == 0.0
    assert bool(torch.isfinite(q).all())
    apart = (q[..., ~outside] - own.softmax(-1)).abs().sum(-1).mean() / 2
    plainly = drafter.twin().to(dtype)
    with torch.no_grad():
        rounded = plainly.logits(plainly.hidden(TOKENS)).float()
    assert float(apart) < 1.5 * float((rounded.softmax(-1) - own.softmax(-1)).abs().sum(-1).mean() / 2) + 1e-4


@pytest.mark.parametrize("size", [1e-3, 1.0, 300.0])
def test_states_of_any_size_are_silenced_and_not_distorted(size: float, target: Target, tmp_path: Path) -> None:
    """In 64 bits, in which the constant's own part in the mean square can be seen."""
    drafter = CausalLM.from_target(target.model, 2, EVERY_THIRD)
    with torch.no_grad():
        drafter.decoder.layers[-1].mlp.down_proj.weight.mul_(size)
        drafter.decoder.layers[-1].self_attn.o_proj.weight.mul_(size)
    model = loaded(drafter, target, tmp_path / "out").double()
    own, full = both(drafter.double(), model)
    q, outside = full.softmax(-1), drafter.target_to_draft < 0
    assert float(full[..., outside].max()) < -100
    torch.testing.assert_close(full[..., ~outside], own, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(q[..., ~outside], own.softmax(-1), rtol=1e-4, atol=1e-8)


def test_a_checkpoints_own_drafter_is_exported_with_its_own_embedding(target: Target, tmp_path: Path) -> None:
    path = tiny_target_dir(tmp_path / "own", seed=5, layers=1, hidden=16)
    drafter = CausalLM.from_checkpoint(path, target.files, EVERY_THIRD)
    assert_proposes_the_same(drafter, loaded(drafter, target, tmp_path / "out"))


def test_an_exported_drafter_of_all_tokens_can_be_made_a_drafter_again(target: Target, tmp_path: Path) -> None:
    drafter = CausalLM.from_target(target.model, 2, torch.arange(320))
    hf.write(drafter, target.files, tmp_path / "out")
    again = CausalLM.from_checkpoint(tmp_path / "out", target.files)
    with torch.no_grad():
        torch.testing.assert_close(again.logits(again.hidden(TOKENS)), drafter.logits(drafter.hidden(TOKENS)))


def test_it_generates_with_the_targets_tokenizer_beside_it(target: Target, tmp_path: Path) -> None:
    drafter = CausalLM.from_target(target.model, 2, EVERY_THIRD)
    model = loaded(drafter, target, tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    prompt = tokenizer("select name from city", return_tensors="pt")
    made = model.generate(**prompt, max_new_tokens=8, do_sample=False, eos_token_id=None)
    assert set(made[0, prompt["input_ids"].shape[1] :].tolist()) <= set(EVERY_THIRD.tolist())
    assert tokenizer.chat_template == target.tokenizer.chat_template


def test_transformers_drafts_for_the_target_with_it(target: Target, tmp_path: Path) -> None:
    drafter = CausalLM.from_target(target.model, 2, EVERY_THIRD)
    model = loaded(drafter, target, tmp_path / "out")
    wanted = target.model.generate(TOKENS[:1], max_new_tokens=12, do_sample=False)
    assert torch.equal(
        target.model.generate(TOKENS[:1], max_new_tokens=12, do_sample=False, assistant_model=model), wanted
    )


def test_the_same_drafter_gives_the_same_bytes(target: Target, tmp_path: Path) -> None:
    drafter = CausalLM.from_target(target.model, 2, EVERY_THIRD)
    for name in ("one", "two"):
        hf.write(drafter, target.files, tmp_path / name)
    assert (tmp_path / "one" / hf.WEIGHTS).read_bytes() == (tmp_path / "two" / hf.WEIGHTS).read_bytes()


def test_it_is_written_in_the_dtype_of_the_targets_files(target: Target, tmp_path: Path) -> None:
    drafter = CausalLM.from_target(target.model, 2, EVERY_THIRD)
    hf.write(drafter, target.files, tmp_path / "own")
    hf.write(drafter, target.files, tmp_path / "half", torch.bfloat16)
    dtypes = [json.loads((tmp_path / name / "config.json").read_text())["dtype"] for name in ("own", "half")]
    assert dtypes == ["float32", "bfloat16"]


def test_a_folder_that_is_there_is_not_written_over(target: Target, tmp_path: Path) -> None:
    drafter = CausalLM.from_target(target.model, 1, EVERY_THIRD)
    with pytest.raises(AlreadyThere, match="name another folder"):
        hf.write(drafter, target.files, tmp_path)


def test_a_weight_that_16_bits_cannot_hold_is_refused_and_nothing_is_left_behind(
    target: Target, tmp_path: Path
) -> None:
    drafter = CausalLM.from_target(target.model, 1, EVERY_THIRD)
    with torch.no_grad():
        drafter.head.weight[0, 0] = 1e6
    with pytest.raises(DrafterRefused, match=f"{HEAD} does not fit"):
        hf.write(drafter, target.files, tmp_path / "out", torch.float16)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["medusa", "mtp", "eagle", "streaming"])
def test_a_kind_that_reads_the_targets_hidden_states_is_refused_with_the_reason(
    kind: str, target: Target, tmp_path: Path
) -> None:
    shared = Shared(load_embedding(target.files), target.files)
    drafter = first_version(kind, target.model, shared, EVERY_THIRD, Sizes(layers=1, depths=2))
    with pytest.raises(DrafterRefused, match=f"a {kind} drafter .* reads the target's hidden states"):
        hf.write(drafter, target.files, tmp_path / "out")


def test_an_architecture_that_the_export_cannot_spell_is_refused(target: Target, tmp_path: Path) -> None:
    model = GPT2LMHeadModel(GPT2Config(vocab_size=320, n_embd=32, n_layer=2, n_head=4, n_positions=64))
    decoder = model.transformer
    config = CausalLMConfig("elsewhere", 2, 320, decoder.config.to_dict())
    drafter = CausalLM(config, decoder.get_input_embeddings().weight.detach())
    with pytest.raises(DrafterRefused, match="gpt2 decoder"):
        hf.write(drafter, target.files, tmp_path / "out")


def test_the_real_targets_width_grows_by_an_eighth_at_most() -> None:
    shape = {**SHAPE, "hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3}
    drafter = CausalLM.from_target(LlamaForCausalLM(LlamaConfig(**shape)), 1, EVERY_THIRD)
    assert plain(drafter).config["hidden_size"] == 648
    assert plain(drafter, whole_heads=False).config["hidden_size"] == 640
