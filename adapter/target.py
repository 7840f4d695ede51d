"""The target: the model whose distribution is reproduced. Found or loaded here, and nowhere else.

`find` gives its files and fingerprints without loading weights (the worker needs no more); `load` gives the
model, its tokenizer and what decoding must know about them.
"""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from adapter import smollm2
from adapter.fingerprints import TargetFiles, TargetNotFound, identify
from adapter.packing import pack
from storage.config import setting

__all__ = [
    "Target",
    "TargetConfig",
    "TargetFiles",
    "TargetNotFound",
    "fetch",
    "load",
    "load_decoder_tensors",
    "load_embedding",
    "load_head",
]

EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "embed_in.weight")  # what checkpoints call the input embedding
HEADS = ("lm_head.weight", "embed_out.weight")  # and the head
BF16_CPU_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}  # x86 and Arm names in /proc/cpuinfo
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True)
class TargetConfig:
    """Which target is served and how its numbers are held."""

    target: str = setting("smollm2", "target: `smollm2`, a Hugging Face directory, or a hub name")
    dtype: str = setting("auto", "bf16, fp32, or auto: bf16 where the hardware computes in it, else fp32")
    device: str = setting("auto", "cpu, cuda, mps, or auto: the best that is there")
    cache: Path = setting(Path("~/.cache/redraft"), "folder of fetched targets and kept fingerprints")


@dataclass(frozen=True)
class Target:
    """A loaded target, ready to decode."""

    files: TargetFiles
    model: Any  # transformers causal LM, in eval mode
    tokenizer: Any
    dtype: torch.dtype
    device: torch.device
    vocab_size: int
    context: int  # tokens of prompt and output together
    eos_ids: frozenset[int]

    @property
    def embedding(self) -> Tensor:
        """The input embedding [V, H], the target's own tensor: what drafters made from it share."""
        weight: Tensor = self.model.get_input_embeddings().weight.detach()
        return weight


def fetch(config: TargetConfig) -> TargetFiles:
    """The files of the target that `config` names; `smollm2` and hub names are fetched at first use.

    Raises `TargetNotFound` where nothing usable is there.
    """
    cache = config.cache.expanduser()
    if config.target == smollm2.NAME:
        return identify(smollm2.NAME, smollm2.fetch(cache), cache)
    path = Path(config.target).expanduser()
    if path.is_dir():
        return identify(config.target, path, cache)
    return identify(config.target, _from_hub(config.target), cache)


def load(config: TargetConfig, files: TargetFiles | None = None) -> Target:
    """The target in memory. `files` saves looking for them again."""
    files = files or fetch(config)
    device = _device(config.device)
    dtype = _dtype(config.dtype, device)
    model = AutoModelForCausalLM.from_pretrained(files.path, dtype=dtype).to(device).eval().requires_grad_(False)
    pack(model)
    tokenizer = AutoTokenizer.from_pretrained(files.path)
    vocab_size = model.get_input_embeddings().weight.shape[0]
    context = model.config.get_text_config().max_position_embeddings
    return Target(files, model, tokenizer, dtype, device, vocab_size, context, _eos_ids(model, tokenizer))


def load_embedding(files: TargetFiles) -> Tensor:
    """The target's input embedding [V, H] in fp32, read alone: training and evaluation need no more of it."""
    embedding = _tensor(files, EMBEDDINGS)
    if embedding is None:
        raise TargetNotFound(f"no input embedding among the tensors of {files.path}: not a supported architecture")
    return embedding


def load_head(files: TargetFiles) -> Tensor | None:
    """The weight of the target's head [V, H] in fp32, read alone; None where it is the input embedding."""
    return _tensor(files, HEADS)


def load_decoder_tensors(files: TargetFiles, names: Collection[str]) -> dict[str, Tensor]:
    """Tensors of the decoder in fp32, by the names that its own state has for them; those that the files hold.

    Files call them by a longer name, where the decoder is a part of a model, and so they do the input embedding.
    """
    stored = {name: file for file in sorted(files.path.glob("*.safetensors")) for name in _names(file)}
    embedding = next((name for name in stored if name.endswith(EMBEDDINGS)), "")
    ending = next((ending for ending in EMBEDDINGS if embedding.endswith(ending)), "")
    prefix, found = embedding.removesuffix(ending), {}
    for file in {stored[prefix + name] for name in names if prefix + name in stored}:
        with safe_open(file, framework="pt") as tensors:
            for name in names:
                if stored.get(prefix + name) == file:
                    found[name] = tensors.get_tensor(prefix + name).float()
    return found


def _names(file: Path) -> list[str]:
    with safe_open(file, framework="pt") as tensors:
        return list(tensors.keys())


def _tensor(files: TargetFiles, endings: tuple[str, ...]) -> Tensor | None:
    """The first tensor among the target's files whose name ends so."""
    for file in sorted(files.path.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a mapping)
                if name.endswith(endings):
                    found: Tensor = tensors.get_tensor(name).float()
                    return found
    return None


def _from_hub(name: str) -> Path:
    """A hub name's snapshot, without weights in other forms."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.jinja", "*.safetensors", "*.model", "*.txt"]))
    except Exception as error:  # the hub's client raises a dozen kinds, and a name may not even be one
        raise TargetNotFound(
            f"REDRAFT_TARGET={name}: no such directory, and not on the hub ({type(error).__name__}). "
            f"Use a directory saved by transformers, a hub name, or {smollm2.NAME}"
        ) from error


def _eos_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """Every token that ends an output: the generation settings and the tokenizer may name different ones."""
    named = model.generation_config.eos_token_id
    ids = set(named if isinstance(named, list) else [named]) | {tokenizer.eos_token_id}
    return frozenset(token for token in ids if token is not None)


def _device(name: str) -> torch.device:
    if name != "auto":
        return torch.device(name)
    if torch.cuda.is_available():
        return torch.device("cuda")
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


def _dtype(name: str, device: torch.device) -> torch.dtype:
    """bf16 only where it is native: emulated, it is slower than fp32 and rounds more."""
    if name != "auto":
        if name not in DTYPES:
            raise ValueError(f"REDRAFT_DTYPE={name}: use auto, bf16 or fp32")
        return DTYPES[name]
    return torch.bfloat16 if device.type != "cpu" or _bf16_cpu() else torch.float32


def dtype_name(dtype: torch.dtype) -> str:
    """What REDRAFT_DTYPE calls it."""
    return next(name for name, known in DTYPES.items() if known == dtype)


def _bf16_cpu() -> bool:
    try:
        return bool(BF16_CPU_FLAGS & set(Path("/proc/cpuinfo").read_text().split()))
    except OSError:  # no Linux
        return False
