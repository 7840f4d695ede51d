"""Low-rank adapters beside frozen layers."""

import torch
from torch import nn

from adapter.drafters.low_rank import ADAPTER, Adapted, LowRank, adapt, start


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 4), nn.Sequential(nn.ReLU(), nn.Linear(4, 8, bias=False))).requires_grad_(False)


def test_adapted_layers_start_as_they_were() -> None:
    module, x = layers(), torch.randn(3, 6)
    before = module(x)
    adapt(module, 2)
    start(module, torch.Generator().manual_seed(0))
    assert torch.equal(module(x), before)


def test_what_is_added_is_of_the_rank_and_learns_alone() -> None:
    module = layers()
    adapt(module, 2)
    start(module, torch.Generator().manual_seed(0))
    learning = {name: weight.shape for name, weight in module.named_parameters() if weight.requires_grad}
    assert all(ADAPTER in name for name in learning)
    assert sorted(learning.values()) == [(2, 4), (2, 6), (4, 2), (8, 2)]


def test_the_base_of_an_adapted_layer_is_the_layer_without_what_is_added() -> None:
    linear, x = nn.Linear(6, 4), torch.randn(3, 6)
    adapted = Adapted(linear, 2)
    nn.init.ones_(adapted.adapter.up.weight)
    assert torch.equal(adapted.base(x), linear(x))
    torch.testing.assert_close(adapted(x), linear(x) + adapted.adapter(x))


def test_the_same_seed_gives_the_same_adapters() -> None:
    one, two = LowRank(6, 4, 2), LowRank(6, 4, 2)
    for adapter in (one, two):
        start(adapter, torch.Generator().manual_seed(5))
    assert torch.equal(one.down.weight, two.down.weight)
