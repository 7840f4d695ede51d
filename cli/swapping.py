"""How the engine behind a sidecar takes another version (`redraft sidecar --swap`): what writes its files, and what
swaps. Made when the drafter is known, as nothing of it is needed before.
"""

from contextlib import ExitStack
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from cli.settings import settings
from storage.config import StorageConfig

if TYPE_CHECKING:
    from service.hosts.lossy import Seen
    from service.hosts.sidecar.following import Load, Swapping
    from service.hosts.sidecar.upstream import Upstream
    from service.hosts.swapping import Swapper
    from storage.registry import Drafter, Registry


class Swap(StrEnum):
    """How an engine takes another version."""

    NONE = "none"
    VLLM = "vllm"
    SGLANG = "sglang"
    LLAMACPP = "llamacpp"


def known(swap: Swap) -> "Seen":
    """What is known of the engine's settings before it is asked: all of one that redraft starts itself."""
    from service.hosts.llamacpp.blue_green import LlamaCppConfig
    from service.hosts.lossy import UNSEEN, llamacpp_command

    return llamacpp_command(settings(LlamaCppConfig).llamacpp_command) if swap is Swap.LLAMACPP else UNSEEN


@dataclass(frozen=True)
class Swaps:
    """One engine's swapping. What it starts, `stack` takes down again."""

    swap: Swap
    stack: ExitStack
    upstream: "Upstream"
    storage: StorageConfig
    registry: "Registry"

    def ready(self, drafter: "Drafter") -> "tuple[Load, Swapping]":
        """What loads and what swaps the drafter's versions."""
        from service.hosts.sidecar.following import Fixed

        if self.swap is Swap.NONE:
            fixed = Fixed()
            return fixed.load, fixed.swap
        return self._exported(drafter), self._swapper.swap

    def _exported(self, drafter: "Drafter") -> "Load":
        from adapter.target import TargetConfig, fetch, load_embedding
        from adapter.versions import Versions
        from service.hosts import exporting
        from storage.weights import WeightsStore

        files = fetch(settings(TargetConfig))
        versions = Versions(WeightsStore(self.storage.weights_folder), files, load_embedding(files))
        folder = self.storage.home.absolute() / "exports"
        if self.swap is not Swap.LLAMACPP:
            return exporting.Exports(versions, drafter, folder, exporting.checkpoint).load
        from service.hosts.llamacpp.blue_green import LlamaCppConfig

        like = settings(LlamaCppConfig).llamacpp_target
        form = exporting.gguf(Path(like) if like else None)
        return exporting.Exports(versions, drafter, folder, form, ".gguf").load

    @cached_property
    def _swapper(self) -> "Swapper":
        """One, however often a drafter turns up."""
        if self.swap is Swap.VLLM:
            return self._vllm()
        return self._llamacpp() if self.swap is Swap.LLAMACPP else self._sglang()

    def _vllm(self) -> "Swapper":
        from service.hosts.vllm_push import VllmPush, VllmPushConfig
        from storage.pushes import Pushes

        staging = self.storage.home.absolute() / "staging"
        push = VllmPush(self.upstream.url, Pushes(self.registry.engine), staging, settings(VllmPushConfig))
        self.stack.callback(push.close)
        push.recover()
        return push

    def _llamacpp(self) -> "Swapper":
        from service.hosts.llamacpp.blue_green import BlueGreen, LlamaCppConfig

        folder, upstream = self.storage.home.absolute() / "llamacpp", self.upstream
        green = BlueGreen(upstream.url, upstream.flip, upstream.busy, folder, settings(LlamaCppConfig))
        self.stack.callback(green.close)
        return green

    def _sglang(self) -> "Swapper":
        from service.hosts.sglang import SglangPush, SglangPushConfig
        from service.hosts.sglang_plugin.pointer import PointerConfig

        push = SglangPush(self.upstream.url, settings(SglangPushConfig), settings(PointerConfig))
        push.recover()
        return push
