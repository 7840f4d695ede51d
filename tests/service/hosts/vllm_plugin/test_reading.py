"""Weights read back from a model whose matrices only its kernels know."""

import pytest
import torch
from torch import nn

from service.hosts.vllm_plugin.checkpoint import differing, problems
from service.hosts.vllm_plugin.reading import columns, contents, sample, shapes
from tests.service.hosts.vllm_push.vllm_like import Packed, TinyModel, weights

QKV = "model.q_proj.weight"


def test_a_packed_matrix_is_read_bit_for_bit() -> None:
    matrix = torch.randn(40, 96, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
    layer = Packed(96, 40)
    layer.pack(matrix)
    model = nn.Module()
    model.lin = layer
    ((name, read),) = contents(model, count=0)
    assert name == "lin.weight"
    assert torch.equal(read, matrix)


def test_fused_layers_are_read_under_the_names_of_checkpoints() -> None:
    model, expected = TinyModel(seed=1), weights(1)
    assert {name: tuple(tensor.shape) for name, tensor in expected.items()} == shapes(model)
    read = dict(contents(model, count=0))
    assert all(torch.equal(read[name], tensor) for name, tensor in expected.items())


def test_the_sampled_columns_are_always_the_same() -> None:
    assert torch.equal(columns(576, 64), columns(576, 64))
    assert len(set(columns(576, 64).tolist())) == 64
    assert columns(8, 64).tolist() == list(range(8))


def test_only_the_sampled_columns_count() -> None:
    wide = torch.randn(4, 576)
    changed = wide.clone()
    unread = next(i for i in range(576) if i not in columns(576, 64).tolist())
    changed[0, unread] += 1
    assert torch.equal(sample(wide, torch.float32), sample(changed, torch.float32))
    assert not torch.equal(sample(wide, torch.float32, 0), sample(changed, torch.float32, 0))


def test_what_kernels_take_for_zero_is_zero() -> None:
    tensor = torch.tensor([-0.0, 1e-39, 1.0])
    assert sample(tensor, torch.bfloat16).tolist() == [0.0, 0.0, 1.0]
    assert not torch.signbit(sample(tensor, torch.bfloat16)).any()


def test_a_model_holds_its_own_checkpoint_and_no_other() -> None:
    model = TinyModel(seed=1)
    assert differing(weights(1), model, (), 64)[0] == []
    wrong, fingerprint = differing(weights(2), model, (), 64)
    assert sorted(wrong) == sorted(weights(2))
    assert fingerprint == differing(weights(1), model, (), 64)[1]


def test_one_changed_weight_is_named() -> None:
    tensors = weights(1)
    tensors["model.k_proj.weight"][0, 0] += 1
    assert differing(tensors, TinyModel(seed=1), (), 64)[0] == ["model.k_proj.weight"]


def test_a_checkpoint_in_another_dtype_is_compared_as_it_is_loaded() -> None:
    precise = {name: tensor.float() for name, tensor in weights(1).items()}
    assert differing(precise, TinyModel(seed=1), (), 64)[0] == []


def test_a_fitting_checkpoint_has_no_problem() -> None:
    assert problems(weights(1), TinyModel(seed=0), TinyModel(seed=9)) == []


@pytest.mark.parametrize(("change", "said"), [
    (lambda t: t.pop(QKV), f"{QKV}: is missing"),
    (lambda t: t.update({QKV: torch.zeros(8, 9)}), f"{QKV}: has shape [8, 9], the draft [8, 8]"),
    (lambda t: t[QKV].__setitem__((0, 0), float("nan")), f"{QKV}: has values that are not finite"),
    (lambda t: t.update({"model.extra": torch.zeros(1)}), "model.extra: the draft has no such tensor"),
])  # fmt: skip
def test_a_checkpoint_that_does_not_fit_is_refused_by_name(change: object, said: str) -> None:
    tensors = weights(1)
    change(tensors)  # type: ignore[operator]
    assert problems(tensors, TinyModel(seed=0), TinyModel(seed=9)) == [said]


def test_what_the_draft_shares_with_the_target_must_not_be_in_the_file() -> None:
    draft, target = TinyModel(seed=0), TinyModel(seed=9)
    draft.model.embed_tokens = target.model.embed_tokens
    assert problems(weights(1), draft, target) == ["model.embed_tokens.weight: is shared with the target"]
    own = {name: tensor for name, tensor in weights(1).items() if "embed" not in name}
    assert problems(own, draft, target) == []


def test_names_without_the_model_in_front_are_those_of_eagle_checkpoints() -> None:
    plain = {name.removeprefix("model."): tensor for name, tensor in weights(1).items()}
    assert problems(plain, TinyModel(seed=0), TinyModel(seed=9)) == []
    assert differing(plain, TinyModel(seed=1), (), 64)[0] == []
