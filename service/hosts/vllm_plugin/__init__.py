"""What runs inside vLLM, so that it takes a drafter's weights from a file: registered by `vllm.general_plugins`.

vLLM's own draft update session does the work (`/start_draft_weight_update` and the two after it); here are the engine
that reads the file (`engine`), what a file must be (`checkpoint`), and what the worker says of its weights (`worker`,
`reading`). The other side is service/hosts/vllm_push. Nothing here imports FastAPI, SQL or Redis.
"""

BACKEND = "redraft_file"


def register() -> None:
    """Make `--weight-transfer-config '{"backend": "redraft_file"}'` known; runs in each of vLLM's processes."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:  # vLLM may load plugins more than once
        WeightTransferEngineFactory.register_engine(BACKEND, "service.hosts.vllm_plugin.engine", "FileEngine")
