"""llama.cpp's own server out of the `xllamacpp` wheel, under the options of `llama-server` that redraft uses.

    python wheel.py -m target.gguf --spec-draft-model drafter.gguf --spec-draft-n-max 3 --port 8080

For a machine without a compiled llama-server. A script of its own: it needs nothing of redraft, and runs in an
environment that has only the wheel.
"""

import argparse
import os
import signal
import sys
import threading
from importlib import import_module
from typing import Any

HOST = "127.0.0.1"


def main() -> int:
    xllamacpp = import_module("xllamacpp")
    params = _params(xllamacpp, _options())
    server = xllamacpp.Server(params)
    print(f"listening on {server.listening_address}", flush=True)  # noqa: T201
    ended = threading.Event()
    for name in (signal.SIGTERM, signal.SIGINT):
        signal.signal(name, lambda *_: ended.set())
    parent = os.getppid()
    while not ended.wait(1.0) and os.getppid() == parent:
        pass
    os._exit(0)  # the library's threads do not end by themselves


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("-m", "--model", required=True)
    parser.add_argument("--spec-draft-model", "-md", default="")
    parser.add_argument("--spec-draft-n-max", type=int, default=3)
    parser.add_argument("--spec-draft-sampling", choices=["greedy", "probabilistic"], default="greedy")
    parser.add_argument("--spec-type", choices=["draft-simple"], default="draft-simple")
    parser.add_argument("--spec-synth-len", type=float, help="LOSSY: accept so many tokens a round, whatever they are")
    parser.add_argument("--metrics", action="store_true", help="always on")
    parser.add_argument("--host", default=HOST)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("-c", "--ctx-size", type=int, default=4096)
    parser.add_argument("-np", "--parallel", type=int, default=1)
    parser.add_argument("-t", "--threads", type=int, default=1)
    return parser.parse_args()


def _params(xllamacpp: Any, options: argparse.Namespace) -> Any:
    params = xllamacpp.CommonParams()
    params.model.path = options.model
    params.hostnames = [options.host]
    params.port = options.port
    params.n_ctx = options.ctx_size
    params.n_parallel = options.parallel
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = options.threads
    params.endpoint_metrics = params.endpoint_slots = params.endpoint_props = True
    if options.spec_draft_model:
        draft = params.speculative.draft
        draft.mparams.path = options.spec_draft_model
        draft.n_max = options.spec_draft_n_max
        draft.probabilistic = options.spec_draft_sampling == "probabilistic"
        draft.cpuparams.n_threads = draft.cpuparams_batch.n_threads = options.threads
        kinds = xllamacpp.common_speculative_type
        if options.spec_synth_len is not None:
            params.speculative.synth_len = options.spec_synth_len
        params.speculative.types = [kinds.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE]
    return params


if __name__ == "__main__":
    sys.exit(main())
