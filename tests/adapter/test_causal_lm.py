"""The drafter made from a target's first layers, or from a checkpoint."""

import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PhiConfig, PhiForCausalLM, Qwen3Config, Qwen3ForCausalLM

from adapter.drafters.causal_lm import CausalLM, CausalLMConfig, DrafterRefused
from adapter.target import Target
from tests.tiny import tiny_target_dir, tiny_tokenizer

EVERY_THIRD = torch.arange(0, 300, 3)


def rebuilt(drafter: CausalLM, embedding: torch.Tensor) -> CausalLM:
    """From what is stored: the configuration through JSON, and the version's tensors."""
    twin = CausalLM(CausalLMConfig.from_dict(json.loads(json.dumps(drafter.config.to_dict()))), embedding)
    twin.load_own(drafter.own_tensors())
    return twin


@torch.no_grad()
def test_all_layers_of_the_target_give_the_targets_own_logits(target: Target) -> None:
    drafter = CausalLM.from_target(target.model, 3, EVERY_THIRD)
    tokens = torch.tensor([[5, 9, 200, 31]])
    expected = target.model(input_ids=tokens).logits[..., EVERY_THIRD]
    torch.testing.assert_close(drafter.logits(drafter.hidden(tokens)), expected)


@torch.no_grad()
def test_fewer_layers_give_another_models_logits(target: Target) -> None:
    tokens = torch.tensor([[5, 9, 200, 31]])
    one, three = (CausalLM.from_target(target.model, layers, EVERY_THIRD).hidden(tokens) for layers in (1, 3))
    assert not torch.allclose(one, three, atol=0.1)


def test_the_embedding_is_the_targets_own_tensor_and_no_part_of_a_version(target: Target) -> None:
    drafter = CausalLM.from_target(target.model, 2, EVERY_THIRD)
    assert drafter.embedding.data_ptr() == target.embedding.data_ptr()
    assert not [name for name in drafter.own_tensors() if "embed" in name]
    assert not [p for p in drafter.trainable() if len(p) == target.vocab_size]


def test_the_other_weights_are_not_shared_with_the_target(target: Target) -> None:
    drafter = CausalLM.from_target(target.model, 1, EVERY_THIRD)
    before = target.model.model.layers[0].mlp.up_proj.weight.clone()
    with torch.no_grad():
        for weight in drafter.trainable():
            weight += 1.0
    assert torch.equal(target.model.model.layers[0].mlp.up_proj.weight, before)


@torch.no_grad()
def test_a_drafter_built_again_from_its_configuration_and_tensors_is_the_same(target: Target) -> None:
    drafter = CausalLM.from_target(target.model, 2, EVERY_THIRD)
    twin = rebuilt(drafter, target.embedding)
    tokens = torch.tensor([[1, 2, 3]])
    assert torch.equal(twin.logits(twin.hidden(tokens)), drafter.logits(drafter.hidden(tokens)))
    assert torch.equal(twin.target_to_draft, drafter.target_to_draft)


def test_the_two_vocabulary_maps_are_inverse(target: Target) -> None:
    drafter = CausalLM.from_target(target.model, 1, EVERY_THIRD)
    assert torch.equal(drafter.target_to_draft[drafter.draft_to_target], torch.arange(len(EVERY_THIRD)))
    assert int((drafter.target_to_draft == -1).sum()) == target.vocab_size - len(EVERY_THIRD)


@torch.no_grad()
def test_a_mask_that_says_causal_changes_nothing(target: Target) -> None:
    drafter = CausalLM.from_target(target.model, 2, EVERY_THIRD)
    tokens = torch.tensor([[7, 8, 9, 10], [10, 9, 8, 7]])
    mask = torch.ones(4, 4, dtype=torch.bool).tril().expand(2, 1, 4, 4)
    positions = torch.arange(4).expand(2, 4)
    torch.testing.assert_close(drafter.hidden(tokens, positions, mask), drafter.hidden(tokens))


@torch.no_grad()
def test_padding_on_the_right_does_not_reach_the_tokens_before_it(target: Target) -> None:
    drafter = CausalLM.from_target(target.model, 2, EVERY_THIRD)
    short, padded = torch.tensor([[7, 8, 9]]), torch.tensor([[7, 8, 9, 0, 0]])
    torch.testing.assert_close(drafter.hidden(padded)[:, :3], drafter.hidden(short))


def test_more_layers_than_the_target_has_are_refused(target: Target) -> None:
    with pytest.raises(DrafterRefused, match="ask for 1 to 3"):
        CausalLM.from_target(target.model, 4, EVERY_THIRD)


def test_tensors_of_another_shape_of_drafter_are_refused(target: Target) -> None:
    one, two = (CausalLM.from_target(target.model, layers, EVERY_THIRD) for layers in (1, 2))
    with pytest.raises(DrafterRefused, match=r"layers\.1"):
        one.load_own(two.own_tensors())


def test_architectures_that_list_their_layers_one_by_one_are_cut_too() -> None:
    config = Qwen3Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        bos_token_id=None,
        eos_token_id=1,
    )
    drafter = CausalLM.from_target(Qwen3ForCausalLM(config), 2, torch.arange(64))
    assert len(drafter.config.decoder["layer_types"]) == 2
    assert drafter.hidden(torch.tensor([[1, 2]])).shape == (1, 2, 32)


@torch.no_grad()
def test_a_checkpoint_with_the_targets_tokenizer_becomes_a_drafter(target: Target, tmp_path: Path) -> None:
    path = tiny_target_dir(tmp_path, seed=5, layers=1, hidden=16)
    drafter = CausalLM.from_checkpoint(path, target.files, EVERY_THIRD)
    tokens = torch.tensor([[5, 9, 200]])
    expected = LlamaForCausalLM.from_pretrained(path)(input_ids=tokens).logits[..., EVERY_THIRD]
    torch.testing.assert_close(drafter.logits(drafter.hidden(tokens)), expected)
    assert "decoder.embed_tokens.weight" in drafter.own_tensors()
    twin = rebuilt(drafter, torch.zeros_like(drafter.embedding))
    assert torch.equal(twin.hidden(tokens), drafter.hidden(tokens))


def save_family(path: Path, rows: int, family: str) -> Path:
    """A checkpoint of the target's tokenizer whose heads are of a size of their own, and its vocabulary padded."""
    shape = {
        "vocab_size": rows,
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "head_dim": 16,  # and not 24 / 6
        "initializer_range": 0.3,
        "bos_token_id": None,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        if family == "llama":
            LlamaForCausalLM(LlamaConfig(**shape)).save_pretrained(path)
        else:
            Qwen3ForCausalLM(Qwen3Config(**shape)).save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("more", [-8, 0, 64])
@torch.no_grad()
def test_a_checkpoint_of_another_width_head_size_and_padding_speaks_the_targets_tokens(
    target: Target, tmp_path: Path, family: str, more: int
) -> None:
    size = target.vocab_size
    path = save_family(tmp_path, size + more, family)
    drafter = CausalLM.from_checkpoint(path, target.files, vocab_size=size)
    assert drafter.vocab_size == len(drafter.target_to_draft) == size
    known, tokens = min(size, size + more), torch.tensor([[5, 9, 200, 31]])
    assert drafter.draft_to_target.tolist() == list(range(known))
    kind = LlamaForCausalLM if family == "llama" else Qwen3ForCausalLM
    expected = kind.from_pretrained(path)(input_ids=tokens).logits[..., :known]
    torch.testing.assert_close(drafter.logits(drafter.hidden(tokens)), expected)
    assert drafter.hidden(torch.tensor([[size - 1]])).isfinite().all()
    some = CausalLM.from_checkpoint(path, target.files, torch.tensor([1, 7, size - 1]), size)
    assert some.draft_to_target.tolist() == ([1, 7] if more < 0 else [1, 7, size - 1])


def test_a_checkpoint_whose_head_has_a_bias_is_refused(target: Target, tmp_path: Path) -> None:
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    PhiForCausalLM(PhiConfig(vocab_size=target.vocab_size, **shape)).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(DrafterRefused, match="has a bias"):
        CausalLM.from_checkpoint(tmp_path, target.files)


def test_a_checkpoint_with_another_tokenizer_is_refused(target: Target, tmp_path: Path) -> None:
    LlamaForCausalLM(
        LlamaConfig(vocab_size=290, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    ).save_pretrained(tmp_path)
    tiny_tokenizer(vocab_size=290).save_pretrained(tmp_path)
    with pytest.raises(DrafterRefused, match="another tokenizer"):
        CausalLM.from_checkpoint(tmp_path, target.files)
