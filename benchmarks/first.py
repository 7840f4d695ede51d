"""Version 1, from which all arms start: made once and kept beside the answers."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load as parse
from torch import Tensor

from adapter.drafters.causal_lm import CausalLM, CausalLMConfig
from adapter.drafters.learnt import LearntDrafter
from adapter.target import TargetFiles
from adapter.versions import Versions
from benchmarks.kept import kept
from storage.registry import Drafter, Registry


@dataclass(frozen=True)
class First:
    """A drafter as the registry and the weights store take it."""

    config: dict[str, Any]
    weights: bytes


def first_version(make: Callable[[], LearntDrafter], key: Any, versions: Versions, folder: Path) -> First:
    """The drafter that `make` makes; `key` says all that it depends on."""

    def packed() -> First:
        drafter = make()
        return First(drafter.config.to_dict(), versions.packed(drafter))

    return kept(folder, "first", key, First, packed)


def register(first: First, name: str, files: TargetFiles, registry: Registry, versions: Versions) -> Drafter:
    """A drafter whose version 1 is `first`, live."""
    blob = versions.put(first.weights)
    prints = files.fingerprint, files.tokenizer_fingerprint
    registry.create_drafter(name, CausalLM.kind, *prints, first.config, blob.sha256, blob.size, "bench")
    return registry.drafter(name)


def drafter_of(first: First, embedding: Tensor) -> CausalLM:
    """Version 1 in memory, without a registry."""
    drafter = CausalLM(CausalLMConfig.from_dict(first.config), embedding)
    drafter.load_own(parse(first.weights))
    return drafter
