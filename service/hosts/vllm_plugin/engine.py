"""The weight transfer engine that loads a drafter from a safetensors file, in vLLM's draft update session.

Between start and finish the draft's layers have no memory (they are on the meta device), and running one then ends
vLLM's engine process: generation must be paused, and a session that fails gives every layer its memory back before
anything else. What the draft then is, is not known; only loading a whole file again makes it a version.
"""

from dataclasses import dataclass

from torch import nn
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import _place_kernel_tensors, get_layerwise_info

from service.hosts.vllm_plugin.checkpoint import checked, drop


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Nothing: there is no connection to make."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """A file on this machine; or, with `abandon`, no file: the session ends and nothing more is loaded."""

    path: str = ""
    sha256: str = ""
    abandon: bool = False


class Abandoned(RuntimeError):
    """The session was ended on request. vLLM has no call for it: it ends when an update raises."""


class FileEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        pass

    def start_weight_update(self) -> None:
        if self.model is self._default_model:
            raise RuntimeError("redraft loads drafters only: the target stays as it is")
        give_back(self.model)  # what a session that was cut off left; vLLM would go on where it ended
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        try:
            if update_info.abandon:
                raise Abandoned("the update session was abandoned on request")
            tensors = checked(update_info.path, update_info.sha256, self.model, self._default_model)
            self.model.load_weights(iter(tensors.items()))
        except BaseException:
            drop()
            give_back(self.model)
            raise

    def finish_weight_update(self) -> None:
        try:
            finalize_layerwise_reload(self.model, self.model_config)
        except BaseException:
            give_back(self.model)
            raise

    def shutdown(self) -> None:
        pass


def give_back(model: nn.Module) -> None:
    """Give each layer that waits for weights the memory that it had before the session; finished ones keep theirs."""
    for layer in model.modules():
        info = get_layerwise_info(layer)
        if info.can_load():
            if info.kernel_tensors is not None:
                _place_kernel_tensors(layer, info)
            info.reset()
