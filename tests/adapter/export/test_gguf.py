"""A drafter as a GGUF file. That llama.cpp proposes with it what redraft does is shown by `make test-llamacpp`."""

import json
from pathlib import Path
from typing import Any

import gguf as library
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from adapter.drafters.causal_lm import CausalLM
from adapter.drafters.learnt import DrafterRefused
from adapter.export import gguf
from adapter.export.plain import HEAD, AlreadyThere, plain
from adapter.target import Target
from tests import tiny
from tests.tiny import tiny_target_dir

EVERY_THIRD = torch.arange(0, 300, 3)
SHAPE = {**tiny.SHAPE, "num_key_value_heads": 2}


def read(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the file says of itself, and its tensors."""
    reader = library.GGUFReader(path)
    said = {key: field.contents() for key, field in reader.fields.items()}
    return said, {tensor.name: tensor for tensor in reader.tensors}


def test_it_has_the_shape_and_the_head_of_the_exported_model(target: Target, tmp_path: Path) -> None:
    drafter = CausalLM.from_target(target.model, 2, EVERY_THIRD)
    gguf.write(drafter, target.files, tmp_path / "d.gguf", torch.float32)
    said, tensors = read(tmp_path / "d.gguf")
    assert said["general.architecture"] == "llama"
    assert said["llama.block_count"] == 2
    assert said["llama.embedding_length"] == 40
    assert said["llama.attention.key_length"] == 8
    assert said["llama.vocab_size"] == 320
    wanted = plain(drafter, whole_heads=False).tensors[HEAD]
    assert torch.equal(torch.from_numpy(tensors["output.weight"].data.copy()), wanted)
    assert len(tensors) == 3 + 2 * 9


def test_vectors_stay_in_32_bits_and_matrices_are_in_what_was_asked_for(target: Target, tmp_path: Path) -> None:
    drafter = CausalLM.from_target(target.model, 1, EVERY_THIRD)
    gguf.write(drafter, target.files, tmp_path / "d.gguf", torch.bfloat16)
    _, tensors = read(tmp_path / "d.gguf")
    kinds = {name: tensor.tensor_type.name for name, tensor in tensors.items()}
    assert {kind for name, kind in kinds.items() if "norm" in name} == {"F32"}
    assert {kind for name, kind in kinds.items() if "norm" not in name} == {"BF16"}
    assert list(tensors["token_embd.weight"].shape) == [40, 320]


def test_turned_queries_and_keys_mean_the_same_under_the_rotation_of_neighbours() -> None:
    heads, width, positions = 2, 8, 5
    rotary = LlamaRotaryEmbedding(
        LlamaConfig(hidden_size=heads * width, num_attention_heads=heads, max_position_embeddings=64)
    )
    state = torch.randn(positions, heads * width)
    weights = [torch.randn(heads * width, heads * width) for _ in range(2)]
    q, k = ((state @ weight.T).view(1, positions, heads, width).transpose(1, 2) for weight in weights)
    cos, sin = rotary(state[None], torch.arange(positions)[None])
    q, k = apply_rotary_pos_emb(q, k, cos, sin)
    expected = q @ k.transpose(-1, -2)

    def neighbours(weight: torch.Tensor) -> torch.Tensor:
        """As llama.cpp rotates: 2i and 2i + 1 are a pair."""
        x = (state @ gguf.turned(weight, heads).T).view(positions, heads, width // 2, 2)
        angle = cos[0, :, None, : width // 2], sin[0, :, None, : width // 2]
        turned = (x[..., 0] * angle[0] - x[..., 1] * angle[1], x[..., 0] * angle[1] + x[..., 1] * angle[0])
        return torch.stack(turned, -1).flatten(2).transpose(0, 1)

    found = neighbours(weights[0]) @ neighbours(weights[1]).transpose(-1, -2)
    torch.testing.assert_close(found, expected[0], rtol=1e-4, atol=1e-4)


def test_llama_3s_positions_are_slowed_down_as_transformers_does_it(tmp_path: Path, target: Target) -> None:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = LlamaConfig(**{**SHAPE, "head_dim": 64, "max_position_embeddings": 131072}, rope_parameters=rope)
    slowed, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plainly = 500000.0 ** -(torch.arange(0, 64, 2) / 64)
    torch.testing.assert_close(plainly / gguf.llama3_factors(rope, 64), slowed, rtol=1e-5, atol=0)
    drafter = CausalLM.from_target(LlamaForCausalLM(config), 1, EVERY_THIRD)
    gguf.write(drafter, target.files, tmp_path / "d.gguf")
    assert "rope_freqs.weight" in read(tmp_path / "d.gguf")[1]


@pytest.mark.parametrize(
    ("model", "architecture", "has"),
    [
        (lambda: Qwen2ForCausalLM(Qwen2Config(**SHAPE)), "llama", "blk.1.attn_q.bias"),
        (lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=16)), "qwen3", "blk.1.attn_q_norm.weight"),
    ],
)
def test_other_families_go_under_the_name_that_llamacpp_has_for_them(
    model: Any, architecture: str, has: str, target: Target, tmp_path: Path
) -> None:
    drafter = CausalLM.from_target(model(), 2, EVERY_THIRD)
    gguf.write(drafter, target.files, tmp_path / "d.gguf")
    said, tensors = read(tmp_path / "d.gguf")
    assert said["general.architecture"] == architecture
    assert has in tensors


def test_the_tokenizer_is_written_from_the_targets(target: Target, tmp_path: Path) -> None:
    gguf.write_target(target.files, tmp_path / "t.gguf")
    said, tensors = read(tmp_path / "t.gguf")
    tokens = said["tokenizer.ggml.tokens"]
    assert tokens == target.tokenizer.convert_ids_to_tokens(range(320))
    assert said["tokenizer.ggml.pre"] == "gpt-2"
    assert said["tokenizer.ggml.token_type"][:3] == [3, 3, 1]
    assert said["tokenizer.ggml.eos_token_id"] == 0
    assert said["tokenizer.chat_template"] == target.tokenizer.chat_template
    assert "output.weight" not in tensors, "the embedding is the head"


def test_the_tokenizer_is_copied_from_the_file_that_serves_the_target(target: Target, tmp_path: Path) -> None:
    gguf.write_target(target.files, tmp_path / "t.gguf")
    drafter = CausalLM.from_target(target.model, 1, EVERY_THIRD)
    gguf.write(drafter, target.files, tmp_path / "d.gguf", like=tmp_path / "t.gguf")
    theirs, ours = (
        {key: value for key, value in read(tmp_path / name)[0].items() if key.startswith("tokenizer.")}
        for name in ("t.gguf", "d.gguf")
    )
    assert ours == theirs


def test_a_file_with_other_tokens_is_refused(target: Target, tmp_path: Path) -> None:
    gguf.write_target(target.files, tmp_path / "t.gguf")
    other = tiny_target_dir(tmp_path / "other")
    data = json.loads((other / "tokenizer.json").read_text())
    vocab = data["model"]["vocab"]
    first, second = (text for text, token in vocab.items() if token in (300, 301))
    vocab[first], vocab[second] = vocab[second], vocab[first]
    (other / "tokenizer.json").write_text(json.dumps(data))
    drafter = CausalLM.from_target(target.model, 1, EVERY_THIRD)
    files = type(target.files)("other", other, "", "")
    with pytest.raises(DrafterRefused, match=r"2 differ\): it is another model's"):
        gguf.write(drafter, files, tmp_path / "d.gguf", like=tmp_path / "t.gguf")
    with pytest.raises(DrafterRefused, match="cannot be read as GGUF"):
        gguf.write(drafter, files, tmp_path / "d.gguf", like=other / "tokenizer.json")
    assert not (tmp_path / "d.gguf").exists()


def test_words_cut_in_a_way_without_a_name_need_a_file_to_copy(target: Target, tmp_path: Path) -> None:
    other = tiny_target_dir(tmp_path / "other")
    data = json.loads((other / "tokenizer.json").read_text())
    steps = [{"type": "Whitespace"}, data["pre_tokenizer"]]
    data["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": steps}
    (other / "tokenizer.json").write_text(json.dumps(data))
    with pytest.raises(DrafterRefused, match="no name here: name the target's own GGUF file with --like"):
        gguf.write_target(type(target.files)("other", other, "", ""), tmp_path / "t.gguf")


def test_the_same_drafter_gives_the_same_bytes(target: Target, tmp_path: Path) -> None:
    drafter = CausalLM.from_target(target.model, 1, EVERY_THIRD)
    for name in ("one", "two"):
        gguf.write(drafter, target.files, tmp_path / name)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


def test_a_file_that_is_there_is_not_written_over(target: Target, tmp_path: Path) -> None:
    drafter = CausalLM.from_target(target.model, 1, EVERY_THIRD)
    (tmp_path / "d.gguf").write_text("mine")
    with pytest.raises(AlreadyThere, match="name another file"):
        gguf.write(drafter, target.files, tmp_path / "d.gguf")
