"""Versions through the weights store: the same drafter comes back, and nothing else ever does."""

import json
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
import torch
from safetensors.torch import load as parse
from safetensors.torch import save as serialise
from torch import Tensor

from adapter.drafters.causal_lm import CausalLM
from adapter.drafters.learnt import LearntDrafter
from adapter.target import Target
from adapter.versions import Versions, WeightsRefused
from storage.views import Drafter, Version
from storage.weights import Blob, BlobDamaged, WeightsStore
from tests.adapter.conditioned import CONDITIONED, first, shaken
from tests.tiny import tiny_target_dir

Tensors = dict[str, Tensor]


@pytest.fixture
def store(tmp_path: Path) -> WeightsStore:
    return WeightsStore(tmp_path / "weights")


@pytest.fixture
def versions(store: WeightsStore, target: Target) -> Versions:
    return Versions(store, target.files, target.embedding)


@pytest.fixture
def drafter(target: Target) -> CausalLM:
    return CausalLM.from_target(target.model, 2, torch.arange(0, target.vocab_size, 2))


def registered(drafter: LearntDrafter, target: Target) -> Drafter:
    files = target.files
    config = json.loads(json.dumps(drafter.config.to_dict()))
    return Drafter(
        1, "code", "causal_lm", files.fingerprint, files.tokenizer_fingerprint, config, datetime.now(UTC), None
    )


def version(blob: Blob) -> Version:
    return Version(1, "code", 1, None, blob.sha256, blob.size, datetime.now(UTC), None)


def rewritten(store: WeightsStore, blob: Blob, change: Callable[[Tensors], None], **metadata: str) -> Version:
    """A well-formed file with other content: whole, but not what it should be."""
    data = store.get(blob.sha256)
    tensors = parse(data)
    change(tensors)
    length = int.from_bytes(data[:8], "little")
    kept = json.loads(json.loads(data[8 : 8 + length])["__metadata__"]["redraft"])
    return version(store.put(serialise(tensors, {"redraft": json.dumps({**kept, **metadata})})))


@torch.no_grad()
def test_a_saved_drafter_comes_back_bit_for_bit(versions: Versions, drafter: CausalLM, target: Target) -> None:
    loaded = versions.load(version(versions.save(drafter)), registered(drafter, target))
    for name, tensor in drafter.own_tensors().items():
        assert torch.equal(loaded.own_tensors()[name], tensor), name
    tokens = torch.tensor([[4, 5, 6]])
    assert torch.equal(loaded.hidden(tokens), drafter.hidden(tokens))
    assert torch.equal(loaded.target_to_draft, drafter.target_to_draft)
    assert loaded.embedding.data_ptr() == target.embedding.data_ptr()


def test_the_same_weights_have_the_same_digest(versions: Versions, drafter: CausalLM) -> None:
    assert versions.save(drafter) == versions.save(drafter)


def test_a_server_in_bf16_gets_its_drafter_in_bf16(
    versions: Versions, store: WeightsStore, drafter: CausalLM, target: Target
) -> None:
    serving = Versions(store, target.files, target.embedding.bfloat16())
    loaded = serving.load(version(versions.save(drafter)), registered(drafter, target))
    assert {p.dtype for p in loaded.parameters()} == {torch.bfloat16}
    assert loaded.decoder.rotary_emb.inv_freq.dtype == torch.float32, "rounded, far positions would be others"


def test_a_checkpoints_own_embedding_is_part_of_the_version(versions: Versions, target: Target, tmp_path: Path) -> None:
    path = tiny_target_dir(tmp_path / "small", seed=5, layers=1, hidden=16)
    drafter = CausalLM.from_checkpoint(path, target.files)
    loaded = versions.load(version(versions.save(drafter)), registered(drafter, target))
    assert torch.equal(loaded.embedding, drafter.embedding)


def test_a_truncated_file_is_refused_by_its_digest(
    versions: Versions, store: WeightsStore, drafter: CausalLM, target: Target
) -> None:
    blob = versions.save(drafter)
    path = store.path(blob.sha256)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(BlobDamaged, match="redraft rollback"):
        versions.load(version(blob), registered(drafter, target))


@pytest.mark.parametrize(
    "data", [b"", b"\x10", b"\xff" * 64, (1 << 40).to_bytes(8, "little") + b"{}", b"\2" + b"\0" * 7 + b"[]"]
)
def test_a_file_that_is_no_safetensors_is_refused(
    versions: Versions, store: WeightsStore, drafter: CausalLM, target: Target, data: bytes
) -> None:
    with pytest.raises(WeightsRefused, match=r"version 1 of code: .*redraft rollback"):
        versions.load(version(store.put(data)), registered(drafter, target))


def test_a_file_cut_short_before_it_was_stored_is_refused(
    versions: Versions, store: WeightsStore, drafter: CausalLM, target: Target
) -> None:
    data = store.get(versions.save(drafter).sha256)
    with pytest.raises(WeightsRefused, match="version 1 of code"):
        versions.load(version(store.put(data[:-100])), registered(drafter, target))


def _nan(tensors: Tensors) -> None:
    tensors["head.weight"][0, 0] = float("nan")


def _missing(tensors: Tensors) -> None:
    del tensors["head.weight"]


def _extra(tensors: Tensors) -> None:
    tensors["head.bias"] = torch.zeros(2)


def _shape(tensors: Tensors) -> None:
    tensors["head.weight"] = tensors["head.weight"][:-1].clone()


def _dtype(tensors: Tensors) -> None:
    tensors["head.weight"] = tensors["head.weight"].half()


def _outside(tensors: Tensors) -> None:
    tensors["draft_to_target"][0] = 320


def _twice(tensors: Tensors) -> None:
    tensors["draft_to_target"][0] = tensors["draft_to_target"][1]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (_nan, "head.weight holds numbers that are not finite"),
        (_missing, r"missing or unknown tensors: \['head.weight'\]"),
        (_extra, r"missing or unknown tensors: \['head.bias'\]"),
        (_shape, "head.weight is torch.float32"),
        (_dtype, "head.weight is torch.float16"),
        (_outside, "outside the vocabulary of 320"),
        (_twice, "or one twice"),
    ],
)
def test_tensors_that_cannot_be_trusted_are_refused(
    versions: Versions,
    store: WeightsStore,
    drafter: CausalLM,
    target: Target,
    change: Callable[[Tensors], None],
    says: str,
) -> None:
    damaged = rewritten(store, versions.save(drafter), change)
    with pytest.raises(WeightsRefused, match=says):
        versions.load(damaged, registered(drafter, target))


@pytest.mark.parametrize("field", ["format", "kind", "target_fingerprint", "tokenizer_fingerprint", "config"])
def test_a_file_that_says_it_belongs_elsewhere_is_refused(
    versions: Versions, store: WeightsStore, drafter: CausalLM, target: Target, field: str
) -> None:
    foreign = rewritten(store, versions.save(drafter), lambda _: None, **{field: "other"})
    with pytest.raises(WeightsRefused, match=f"{field} is other, not "):
        versions.load(foreign, registered(drafter, target))


def test_a_version_of_another_target_is_refused(
    versions: Versions, store: WeightsStore, drafter: CausalLM, target: Target
) -> None:
    elsewhere = Versions(store, replace(target.files, fingerprint="f" * 64), target.embedding)
    with pytest.raises(WeightsRefused, match=r"target_fingerprint is .* not ffff"):
        elsewhere.load(version(versions.save(drafter)), registered(drafter, target))


def test_a_kind_of_drafter_that_is_not_known_is_refused(versions: Versions, drafter: CausalLM, target: Target) -> None:
    with pytest.raises(WeightsRefused, match="of kind hydra: this version knows causal_lm, medusa"):
        versions.load(version(versions.save(drafter)), replace(registered(drafter, target), kind="hydra"))


@pytest.mark.parametrize("kind", CONDITIONED)
def test_a_server_in_bf16_gets_every_kind_in_bf16(
    versions: Versions, store: WeightsStore, target: Target, kind: str
) -> None:
    drafter = first(target, kind, 2)
    serving = Versions(store, target.files, target.embedding.bfloat16())
    loaded = serving.load(version(versions.save(drafter)), replace(registered(drafter, target), kind=kind))
    assert {p.dtype for p in loaded.parameters()} == {torch.bfloat16}
    hidden = torch.randn(1, 3, 32 * len(loaded.taps), dtype=torch.bfloat16)
    for depth, states in enumerate(loaded.unrolled(torch.tensor([[4, 5, 6]]), hidden, None, 2)):
        assert loaded.logits(states, depth).dtype == torch.bfloat16


@pytest.mark.parametrize("kind", CONDITIONED)
def test_a_drafter_of_any_kind_comes_back_bit_for_bit(versions: Versions, target: Target, kind: str) -> None:
    drafter = shaken(first(target, kind, 2, torch.arange(0, target.vocab_size, 2)))
    row = replace(registered(drafter, target), kind=kind)
    loaded = versions.load(version(versions.save(drafter)), row)
    assert loaded.kind == kind
    for name, tensor in drafter.own_tensors().items():
        assert torch.equal(loaded.own_tensors()[name], tensor), name
    assert versions.save(loaded) == versions.save(drafter)
    assert torch.equal(loaded.target_to_draft, drafter.target_to_draft)


def test_a_version_of_another_kind_is_refused(versions: Versions, target: Target) -> None:
    mtp, eagle = first(target, "mtp", 2), first(target, "eagle", 2)
    row = replace(registered(eagle, target), kind="eagle")
    with pytest.raises(WeightsRefused, match="kind is mtp, not eagle"):
        versions.load(version(versions.save(mtp)), row)


def test_weights_that_are_not_finite_are_not_even_stored(
    versions: Versions, store: WeightsStore, drafter: CausalLM
) -> None:
    with torch.no_grad():
        drafter.head.weight[0, 0] = float("inf")
    with pytest.raises(WeightsRefused, match="not finite"):
        versions.save(drafter)
    assert list(store.digests()) == []
