"""Versions on their way between a drafter in memory and the weights store: safetensors, checked both ways.

A file carries what it belongs to (kind, fingerprints, configuration), so that a mix-up is found when it is
loaded, and not in the acceptance rate. Weights are kept in fp32, which small steps of learning need.
"""

import json

import torch
from safetensors import SafetensorError
from safetensors.torch import load as parse
from safetensors.torch import save as serialise
from torch import Tensor

from adapter.drafters.kinds import KINDS
from adapter.drafters.learnt import DrafterConfig, LearntDrafter
from adapter.drafters.shared import Shared
from adapter.fingerprints import TargetFiles
from storage.views import Drafter, Version
from storage.weights import Blob, WeightsStore

FORMAT = "redraft-drafter-1"
MAP = "draft_to_target"
METADATA = "redraft"
CURE = "roll back to a version that is whole (`redraft rollback`), or make the drafter again with `redraft init`"


class WeightsRefused(ValueError):
    """Weights that do not belong here or cannot be trusted; the message says what is wrong and what to do."""


class Versions:
    """Saves and loads the drafters of one target."""

    def __init__(self, store: WeightsStore, files: TargetFiles, embedding: Tensor) -> None:
        """Loaded drafters share `embedding` [V, H], and take its dtype and device."""
        self._store, self._files, self.shared = store, files, Shared(embedding, files)

    @property
    def files(self) -> TargetFiles:
        """The target's."""
        return self._files

    @property
    def vocab_size(self) -> int:
        """V of the target."""
        return len(self.shared.embedding)

    def save(self, drafter: LearntDrafter) -> Blob:
        """Store a drafter's own tensors; the digest names them from now on."""
        return self.put(self.packed(drafter))

    def put(self, packed: bytes) -> Blob:
        return self._store.put(packed)

    def packed(self, drafter: LearntDrafter) -> bytes:
        """A drafter's own tensors as the file that `save` stores: equal drafters give equal bytes."""
        tensors = {name: _plain(tensor) for name, tensor in drafter.own_tensors().items()}
        self._check(tensors, drafter)
        metadata = json.dumps(self._metadata(drafter.kind, drafter.config), sort_keys=True)
        return serialise(tensors, {METADATA: metadata})

    def load(self, version: Version, drafter: Drafter) -> LearntDrafter:
        """The drafter that `version` is. Raises `WeightsRefused`, or the store's `BlobDamaged`."""
        if drafter.kind not in KINDS:
            raise WeightsRefused(
                f"drafter {drafter.name} is of kind {drafter.kind}: this version knows {', '.join(KINDS)}"
            )
        name = f"version {version.number} of {drafter.name}"
        data = self._store.get(version.weights_sha256)
        try:
            tensors = parse(data)
            loaded = KINDS[drafter.kind].rebuilt(drafter.config, self.shared, tensors)
            self._check_metadata(_metadata_of(data), loaded)
            self._check(tensors, loaded)
        except (SafetensorError, KeyError, ValueError) as error:
            raise WeightsRefused(f"{name}: {error}; {CURE}") from error
        loaded.load_own(tensors)
        return loaded

    def _metadata(self, kind: str, config: DrafterConfig) -> dict[str, str]:
        return {
            "format": FORMAT,
            "kind": kind,
            "target_fingerprint": self._files.fingerprint,
            "tokenizer_fingerprint": self._files.tokenizer_fingerprint,
            "config": json.dumps(config.to_dict(), sort_keys=True),
        }

    def _check_metadata(self, found: dict[str, str], loaded: LearntDrafter) -> None:
        for key, expected in self._metadata(loaded.kind, loaded.config).items():
            if found.get(key) != expected:
                raise WeightsRefused(f"{key} is {_short(found.get(key))}, not {_short(expected)}")

    def _check(self, tensors: dict[str, Tensor], drafter: LearntDrafter) -> None:
        """Names, shapes, dtypes, finite numbers, and a vocabulary map into the target's vocabulary."""
        expected = drafter.own_tensors()
        if tensors.keys() != expected.keys():
            raise WeightsRefused(f"missing or unknown tensors: {sorted(tensors.keys() ^ expected.keys())[:4]}")
        for name, tensor in tensors.items():
            dtype = torch.int64 if name == MAP else torch.float32
            if tensor.shape != expected[name].shape or tensor.dtype != dtype:
                raise WeightsRefused(
                    f"{name} is {tensor.dtype} {list(tensor.shape)}, not {dtype} {list(expected[name].shape)}"
                )
            if not bool(torch.isfinite(tensor).all()):
                raise WeightsRefused(f"{name} holds numbers that are not finite")
        ids = tensors[MAP]
        if int(ids.min()) < 0 or int(ids.max()) >= self.vocab_size or len(set(ids.tolist())) != len(ids):
            raise WeightsRefused(f"{MAP} holds ids outside the vocabulary of {self.vocab_size}, or one twice")


def _plain(tensor: Tensor) -> Tensor:
    """As a version keeps it: on the CPU, floats in fp32."""
    kept = tensor.detach().cpu().contiguous()
    return kept.float() if kept.is_floating_point() else kept


def _metadata_of(data: bytes) -> dict[str, str]:
    """What `save` wrote into the header of a safetensors file: 8 bytes of length, and then JSON.

    It is one entry, as safetensors writes several in any order, and equal drafters must have equal digests.
    """
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    metadata: dict[str, str] = json.loads(header.get("__metadata__", {}).get(METADATA, "{}"))
    return metadata


def _short(value: str | None) -> str:
    return "missing" if value is None else value if len(value) <= 20 else f"{value[:12]}..."
