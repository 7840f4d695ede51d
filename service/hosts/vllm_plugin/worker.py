"""Methods added to vLLM's worker (`--worker-extension-cls`): what it holds, bit for bit, and speculation on or off.

Called through /collective_rpc, which passes strings and returns JSON. They run between two steps of the worker, so
each of them is quick: a file's size in reading, or a few columns of each matrix.
"""

import sys
import uuid
from typing import Any

from service.hosts.vllm_plugin import checkpoint
from service.hosts.vllm_plugin.reading import contents, digest, fingerprint


class RedraftWorker:
    """Mixed into vLLM's worker: `self` is one, so names are ours (`redraft_`) and nothing is made at construction."""

    def redraft_describe(self) -> dict[str, Any]:
        """Who this is; `engine` is another after each start."""
        worker: Any = self
        if not hasattr(worker, "_redraft_engine"):
            worker._redraft_engine = uuid.uuid4().hex
        speculative = worker.vllm_config.speculative_config
        draft = worker.get_draft_model()
        return {
            "engine": worker._redraft_engine,
            "vllm": getattr(sys.modules.get("vllm"), "__version__", "unknown"),
            "method": getattr(speculative, "method", None),
            "draft": speculative.draft_model_config.model if draft is not None else None,
            "workers": worker.parallel_config.world_size,
            "speculating": "take_draft_token_ids" not in vars(worker.model_runner),
        }

    def redraft_check(self, path: str, sha256: str) -> dict[str, Any]:
        """Why the file could not be served as the draft; changes nothing. A file without a problem is kept at hand."""
        worker: Any = self
        checkpoint.drop()
        try:
            tensors = checkpoint.read(path, sha256)
        except checkpoint.CheckpointRefused as error:
            return {"problems": [str(error)]}
        found = checkpoint.problems(tensors, worker.get_draft_model(), worker.get_model())
        if not found:
            checkpoint.keep(sha256, tensors)
        return {"problems": found}

    def redraft_target(self, columns: str) -> dict[str, Any]:
        """The target's fingerprint: equal before and after a push, or the push has changed it."""
        worker: Any = self
        read = contents(worker.get_model(), count=int(columns))
        return {"fingerprint": fingerprint({name: digest(values) for name, values in read})}

    def redraft_verify(self, path: str, sha256: str, columns: str) -> dict[str, Any]:
        """The draft's tensors that are not the file's; and its fingerprint."""
        worker: Any = self
        try:
            tensors = checkpoint.read(path, sha256)
        except checkpoint.CheckpointRefused as error:
            return {"differing": [str(error)], "fingerprint": ""}
        target = worker.get_model()
        wrong, found = checkpoint.differing(tensors, worker.get_draft_model(), target.modules(), int(columns))
        checkpoint.drop()
        return {"differing": wrong, "fingerprint": found}

    def redraft_speculate(self, on: str) -> dict[str, Any]:
        """Turn proposing on or off: off, the draft is not run at all, and requests decode plainly.

        The draft is taken to have room for no token, which vLLM knows how to live with; what it would then propose
        instead (zeros) is not handed to the scheduler.
        """
        runner: Any = getattr(self, "model_runner")  # noqa: B009
        if not hasattr(runner, "effective_drafter_max_model_len") or not hasattr(runner, "take_draft_token_ids"):
            return {"speculating": True, "refused": f"{type(runner).__name__} cannot speculate less"}
        off = "take_draft_token_ids" in vars(runner)
        if on == "off" and not off:
            runner._redraft_room = runner.effective_drafter_max_model_len
            runner.effective_drafter_max_model_len = 0
            runner.take_draft_token_ids = lambda: None
        elif on == "on" and off:
            runner.effective_drafter_max_model_len = runner._redraft_room
            del runner.take_draft_token_ids
        return {"speculating": on == "on"}
