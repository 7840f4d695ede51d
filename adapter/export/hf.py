"""A `causal_lm` drafter as a Hugging Face checkpoint: what vLLM's `draft_model`, SGLang and transformers load."""

import json
import os
import shutil
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoConfig

from adapter.drafters.learnt import LearntDrafter
from adapter.export.plain import AlreadyThere, Plain, held, plain
from adapter.fingerprints import TOKENIZER_FILES, TargetFiles

WEIGHTS = "model.safetensors"
ARCHITECTURES = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen3": "Qwen3ForCausalLM"}
BESIDE = (
    *TOKENIZER_FILES,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
)


def write(drafter: LearntDrafter, target_files: TargetFiles, folder: Path, dtype: torch.dtype | None = None) -> None:
    """The drafter under `folder`, whole or not at all, in `dtype`, or in the target's own where none is named.

    The same drafter gives the same bytes. Raises `DrafterRefused` for what no engine would load, and
    `AlreadyThere` where something is there already.
    """
    if folder.exists():
        raise AlreadyThere(f"{folder} is there already: name another folder, or remove it")
    model = plain(drafter)
    chosen = dtype or stored_dtype(target_files)
    folder.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    try:
        _fill(work, model, target_files, chosen)
        os.replace(work, folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def stored_dtype(files: TargetFiles) -> torch.dtype:
    """What the target's own files are in; engines compute in it unless told otherwise."""
    config = json.loads((files.path / "config.json").read_text())
    name = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    dtype = getattr(torch, name.removeprefix("torch."), None)
    return dtype if isinstance(dtype, torch.dtype) and dtype.is_floating_point else torch.float32


def _fill(folder: Path, model: Plain, target_files: TargetFiles, dtype: torch.dtype) -> None:
    tensors = {name: held(name, tensor, dtype) for name, tensor in sorted(model.tensors.items())}
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})
    _flush(folder / WEIGHTS)
    config = {**model.config, "architectures": [ARCHITECTURES[model.config["model_type"]]], "dtype": dtype}
    AutoConfig.for_model(**config).save_pretrained(folder)
    for name in BESIDE:
        if (target_files.path / name).is_file():
            shutil.copyfile(target_files.path / name, folder / name)
    folder.chmod(0o755)  # a temporary folder is its maker's only


def _flush(path: Path) -> None:
    """On disk before the folder has its name."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
