"""The kinds on one footing: version 1, what a version holds, and what is refused."""

import json

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from adapter.drafters.eagle import fused_taps
from adapter.drafters.kinds import KINDS, Sizes, first_version, kind_of
from adapter.drafters.learnt import DrafterRefused
from adapter.drafters.mtp import Mtp
from adapter.drafters.shared import Shared
from adapter.target import Target, load_head
from tests.adapter.conditioned import CONDITIONED, first, shaken
from tests.tiny import tiny_target_dir

EVERY_THIRD = torch.arange(0, 300, 3)


@pytest.mark.parametrize("kind", KINDS)
def test_a_drafter_built_again_from_its_configuration_and_tensors_is_the_same(target: Target, kind: str) -> None:
    drafter = shaken(first(target, kind, 3, EVERY_THIRD))
    shared = Shared(target.embedding, target.files)
    config = json.loads(json.dumps(drafter.config.to_dict()))
    twin = kind_of(kind).rebuilt(config, shared, drafter.own_tensors())
    twin.load_own(drafter.own_tensors())
    tokens, hidden = torch.tensor([[5, 6, 7, 8]]), torch.randn(1, 4, 32 * max(1, len(drafter.taps)))
    with torch.no_grad():
        for j, both in enumerate(zip(*(d.unrolled(tokens, hidden, None, 3) for d in (drafter, twin)), strict=True)):
            assert torch.equal(drafter.logits(both[0], j), twin.logits(both[1], j))
    assert torch.equal(twin.target_to_draft, drafter.target_to_draft)
    assert (twin.kind, twin.taps, twin.depths) == (drafter.kind, drafter.taps, drafter.depths)


@pytest.mark.parametrize("kind", KINDS)
def test_no_tensor_of_the_targets_is_part_of_a_version(target: Target, kind: str) -> None:
    drafter = first(target, kind)
    theirs = {tensor.data_ptr() for tensor in target.model.state_dict(keep_vars=True).values()}
    own = drafter.own_tensors()
    assert not {tensor.data_ptr() for tensor in own.values()} & theirs
    assert not [name for name in own if "embed" in name]
    assert not {weight.data_ptr() for weight in drafter.trainable()} & theirs


def test_the_mtp_drafter_has_no_head_of_its_own(target: Target) -> None:
    drafter = first(target, "mtp", 3, EVERY_THIRD)
    assert not [name for name, tensor in drafter.own_tensors().items() if tensor.shape == (100, 32)]
    assert not [weight for weight in drafter.trainable() if weight.shape == (100, 32)]
    state = torch.randn(2, 32)
    torch.testing.assert_close(drafter.logits(state), (state @ target.embedding.T)[:, EVERY_THIRD])


@pytest.mark.parametrize("kind", KINDS)
def test_a_twin_shares_no_weight_and_says_the_same(target: Target, kind: str) -> None:
    drafter = shaken(first(target, kind, 2, EVERY_THIRD))
    twin = drafter.twin()
    for name, tensor in drafter.own_tensors().items():
        assert torch.equal(tensor, twin.own_tensors()[name])
    with torch.no_grad():
        for weight in twin.trainable():
            weight += 1.0
    assert not torch.equal(twin.trainable()[0], drafter.trainable()[0])
    assert torch.equal(twin.target_to_draft, drafter.target_to_draft)


@pytest.mark.parametrize("kind", CONDITIONED)
def test_tensors_of_another_kind_or_size_are_refused(target: Target, kind: str) -> None:
    drafter = first(target, kind)
    for other in {*CONDITIONED, "causal_lm"} - {kind}:
        with pytest.raises(DrafterRefused, match="tensors do not fit"):
            drafter.load_own(first(target, other).own_tensors())


def test_medusas_heads_start_as_the_targets_own(target: Target) -> None:
    drafter = first(target, "medusa", 3, EVERY_THIRD)
    state = torch.randn(2, 32)
    for head in range(3):
        torch.testing.assert_close(drafter.logits(state, head), (state @ target.embedding.T)[:, EVERY_THIRD])


@pytest.mark.parametrize("kind", ["mtp", "eagle"])
def test_the_layer_starts_as_the_targets_last(target: Target, kind: str) -> None:
    own, last = first(target, kind).own_tensors(), target.model.model.layers[2].state_dict()
    for name, tensor in last.items():
        assert torch.equal(own[f"decoder.layers.0.{name}"], tensor), name


def test_eagle_reads_low_middle_and_high_layers() -> None:
    assert fused_taps(30) == (2, 15, 27)
    assert fused_taps(3) == (1, 2)
    assert fused_taps(1) == (1,)


def test_a_head_that_is_not_the_embedding_is_read_from_the_targets_files(target: Target) -> None:
    assert load_head(target.files) is None


def test_an_untied_targets_head_is_what_mtp_shares(target: Target, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tiny_target_dir(tmp_path_factory.mktemp("untied"))
    config = LlamaConfig.from_pretrained(path)
    config.tie_word_embeddings = False
    model = LlamaForCausalLM(config)
    model.save_pretrained(path)
    files = type(target.files)(**{**vars(target.files), "path": path})
    shared = Shared(model.get_input_embeddings().weight.detach(), files)
    drafter = first_version("mtp", model, shared, EVERY_THIRD, Sizes())
    assert isinstance(drafter, Mtp)
    assert torch.equal(drafter.head.weight, model.lm_head.weight[EVERY_THIRD])


def test_a_kind_that_there_is_not_is_refused_with_those_there_are() -> None:
    with pytest.raises(DrafterRefused, match="use causal_lm, medusa, mtp, eagle"):
        kind_of("hydra")


@pytest.mark.parametrize("kind", CONDITIONED)
def test_a_drafter_of_no_depth_is_refused(target: Target, kind: str) -> None:
    with pytest.raises(DrafterRefused, match="ask for 1"):
        first(target, kind, 0)


def test_a_target_whose_layers_cannot_be_read_is_refused(target: Target) -> None:
    class Elsewhere(torch.nn.Module):
        """The target, its layers under another name."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = target.model

        def get_output_embeddings(self) -> torch.nn.Module:
            head: torch.nn.Module = target.model.get_output_embeddings()
            return head

        def get_decoder(self) -> torch.nn.Module:
            return torch.nn.Linear(1, 1)

    with pytest.raises(DrafterRefused, match="hidden states, which cannot be read of this target"):
        first_version("medusa", Elsewhere(), Shared(target.embedding, target.files), EVERY_THIRD, Sizes())
