"""A `causal_lm` drafter, or a target, as a GGUF file: what llama.cpp loads.

llama.cpp drafts only with a model whose tokens are the target's, entry by entry. So the tokenizer of a drafter's file
is copied from the GGUF file that serves the target, where there is one (`like`), and else written from the target's
tokenizer (adapter/export/gguf_tokenizer.py).
"""

import os
import tempfile
from pathlib import Path

import gguf
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from adapter.drafters.learnt import DrafterRefused, LearntDrafter
from adapter.export.gguf_tokenizer import copy_tokenizer, write_tokenizer
from adapter.export.plain import FAMILIES, HEAD, AlreadyThere, Plain, held, plain, spelt
from adapter.fingerprints import TargetFiles

FILE_TYPES = {
    torch.float32: gguf.LlamaFileType.ALL_F32,
    torch.float16: gguf.LlamaFileType.MOSTLY_F16,
    torch.bfloat16: gguf.LlamaFileType.MOSTLY_BF16,
}
TURNED = ("q_proj.weight", "k_proj.weight", "q_proj.bias", "k_proj.bias")


def write(
    drafter: LearntDrafter,
    target_files: TargetFiles,
    path: Path,
    dtype: torch.dtype = torch.float16,
    like: Path | None = None,
) -> None:
    """The drafter as the file `path`, whole or not at all, with the tokenizer of the target's GGUF file `like`.

    The same drafter gives the same bytes. Raises `DrafterRefused` for what llama.cpp would not load or draft with,
    and `AlreadyThere` where something is there already.
    """
    write_model(plain(drafter, whole_heads=False), f"redraft {drafter.kind} drafter", target_files, path, dtype, like)


def write_target(target_files: TargetFiles, path: Path, dtype: torch.dtype = torch.float16) -> None:
    """The target itself, for who has it in transformers' form only. All of it is in memory for a while, in fp32."""
    model = AutoModelForCausalLM.from_pretrained(target_files.path, dtype=torch.float32)
    config = model.config.to_dict()
    if config["model_type"] not in FAMILIES:
        raise DrafterRefused(
            f"a {config['model_type']} target cannot be written as GGUF by redraft: convert it yourself"
        )
    tied = {HEAD} if config.get("tie_word_embeddings") else set()
    tensors = {name: tensor.detach() for name, tensor in model.state_dict().items() if name not in tied}
    write_model(spelt(config, tensors), target_files.name, target_files, path, dtype)


def write_model(
    model: Plain, name: str, target_files: TargetFiles, path: Path, dtype: torch.dtype, like: Path | None = None
) -> None:
    """Any language model of these families with the target's tokens."""
    if path.exists():
        raise AlreadyThere(f"{path} is there already: name another file, or remove it")
    architecture = "qwen3" if model.config["model_type"] == "qwen3" else "llama"
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, work = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    try:
        writer = gguf.GGUFWriter(work, architecture)
        writer.add_name(name)
        _shape(writer, model, dtype)
        vocabulary = model.config["vocab_size"]
        copy_tokenizer(writer, like, target_files.path, vocabulary) if like else write_tokenizer(
            writer, target_files.path, vocabulary
        )
        _tensors(writer, model, architecture, dtype)
        _finish(writer, Path(work), path)
    finally:
        Path(work).unlink(missing_ok=True)


def _shape(writer: gguf.GGUFWriter, model: Plain, dtype: torch.dtype) -> None:
    config = model.config
    if config.get("sliding_window"):
        raise DrafterRefused("a decoder with sliding windows cannot be written as GGUF yet")
    writer.add_file_type(FILE_TYPES[dtype])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(config["head_dim"])
    _rope(writer, model)


def _rope(writer: gguf.GGUFWriter, model: Plain) -> None:
    rope = model.config["rope_parameters"]
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    elif rope["rope_type"] == "llama3":
        factors = llama3_factors(rope, model.config["head_dim"])
        writer.add_tensor("rope_freqs.weight", factors.numpy())
    elif rope["rope_type"] != "default":
        raise DrafterRefused(f"rotary positions of type {rope['rope_type']} cannot be written as GGUF yet")


def llama3_factors(rope: dict[str, float], head_dim: int) -> Tensor:
    """By what llama.cpp divides each frequency [head_dim / 2]: Llama 3.1 slows the slow ones down, and smoothly so."""
    frequencies = rope["rope_theta"] ** -(torch.arange(0, head_dim, 2).double() / head_dim)
    turns = rope["original_max_position_embeddings"] * frequencies / (2 * torch.pi)  # within the first context
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 / ((1 - smooth) / rope["factor"] + smooth)).float()


def _tensors(writer: gguf.GGUFWriter, model: Plain, architecture: str, dtype: torch.dtype) -> None:
    """Vectors stay in 32 bits, as llama.cpp keeps them."""
    layers, config = model.config["num_hidden_layers"], model.config
    names = gguf.get_tensor_name_map(
        gguf.MODEL_ARCH.QWEN3 if architecture == "qwen3" else gguf.MODEL_ARCH.LLAMA, layers
    )
    for name, tensor in sorted(model.tensors.items()):
        stem, _, ending = name.rpartition(".")
        if architecture == "llama" and name.endswith(TURNED):
            heads = config["num_attention_heads" if ".q_proj." in name else "num_key_value_heads"]
            tensor = turned(tensor, heads)
        _add(writer, f"{names.get_name(stem)}.{ending}", tensor, torch.float32 if tensor.dim() == 1 else dtype)


def turned(tensor: Tensor, heads: int) -> Tensor:
    """Rows of q or k in llama.cpp's order: its rotation takes neighbours as pairs, transformers' the two halves."""
    halves = tensor.reshape(heads, 2, -1, *tensor.shape[1:])
    return halves.transpose(1, 2).reshape(tensor.shape)


def _add(writer: gguf.GGUFWriter, name: str, tensor: Tensor, dtype: torch.dtype) -> None:
    made = held(name, tensor, dtype)
    if dtype == torch.bfloat16:  # numpy has none: the bits, and what they mean
        writer.add_tensor(name, made.view(torch.uint8).numpy(), raw_dtype=gguf.GGMLQuantizationType.BF16)
    else:
        writer.add_tensor(name, made.numpy())


def _finish(writer: gguf.GGUFWriter, work: Path, path: Path) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with work.open("rb") as file:
        os.fsync(file.fileno())
    work.chmod(0o644)
    os.replace(work, path)
