"""The weights that a benchmark measures: the configured target, and a drafter of the registry."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cli.opened import open_drafter
from cli.output import CommandError
from cli.settings import settings

if TYPE_CHECKING:
    from adapter.drafters.causal_lm import CausalLM
    from adapter.target import Target
    from storage.registry import Drafter, Version


@dataclass(frozen=True)
class Subject:
    target: "Target"
    drafter: "CausalLM"
    name: str
    version: int


def load_subject(name: str, number: int | None, random_weights: bool = False) -> Subject:
    """Target and drafter in memory: version `number`, or the live one. The registry is asked before anything slow.

    With `random_weights` the drafter has its shape and nothing that it learned: a useless one.
    """
    from adapter.target import TargetConfig, load

    opened = open_drafter(name)
    registry, drafter = opened.registry, opened.drafter
    version = registry.live(drafter.name) if number is None else registry.version(drafter.name, number)
    target = load(settings(TargetConfig))
    registry.choose(drafter.name, target.files.fingerprint)  # raises where it was made for another target
    loaded = _weights(target, drafter, version)
    return Subject(target, _forgotten(loaded) if random_weights else loaded, drafter.name, version.number)


def _weights(target: "Target", drafter: "Drafter", version: "Version") -> "CausalLM":
    from adapter.drafters.causal_lm import CausalLM
    from adapter.versions import Versions
    from storage.config import StorageConfig
    from storage.weights import WeightsStore

    store = WeightsStore(settings(StorageConfig).weights_folder)
    loaded = Versions(store, target.files, target.embedding).load(version, drafter)
    if not isinstance(loaded, CausalLM):
        raise CommandError(f"drafter {drafter.name} is of kind {loaded.kind}: this benchmark measures causal_lm only")
    return loaded


def _forgotten(drafter: "CausalLM") -> "CausalLM":
    import torch

    with torch.random.fork_rng():
        torch.manual_seed(0)
        made = drafter.fresh()
    own = {**made.own_tensors(), "draft_to_target": drafter.draft_to_target}
    made.load_own(own)
    return made
