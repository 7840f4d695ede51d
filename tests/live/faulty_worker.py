"""The plugin's worker with ways to break it from outside; runs inside vLLM, for the live test of pushes only."""

from collections.abc import Iterable
from itertools import islice
from typing import Any

from torch import Tensor

from service.hosts.vllm_plugin.worker import RedraftWorker


class FaultyWorker(RedraftWorker):
    def faulty_load(self, how: str) -> dict[str, Any]:
        """Have the draft's next load go wrong: `half` raises in the middle, `target` harms the target too."""
        worker: Any = self
        model = worker.get_draft_model()

        def load_weights(given: Iterable[tuple[str, Tensor]]) -> object:
            del model.load_weights  # only once
            if how == "target":
                worker.get_model().model.norm.weight.data.mul_(1.5)
                return model.load_weights(given)
            tensors = list(given)
            model.load_weights(islice(tensors, len(tensors) // 2))
            raise RuntimeError("made to fail in the middle of a load")

        model.load_weights = load_weights
        return {"how": how}
