"""redraft's drafters inside an unmodified vLLM server: the proposer that its `custom_class` method is given.

    vLLM: verify -> Proposer.propose -> schedule -> verify ...
    propose (core): what came of the last proposals -> records, the floor; then the live version's next proposals

This is vLLM's own process and thread. Nothing is raised into it: on a fault of redraft's own there is no proposal,
vLLM decodes plainly, and the fault is counted.
"""

import importlib
import os
from multiprocessing.util import Finalize
from typing import Any

import msgspec
import structlog
import torch

from service.engine.floor import FloorConfig
from service.engine.governor import GovernorConfig
from service.engine.ngrams import Ngrams
from service.hosts import lossy
from service.hosts.lossy import UNSEEN, Guard, LossyConfig
from service.hosts.vllm import runner
from service.hosts.vllm.attaching import SOURCE, Attachment, Engine, HostConfig
from service.hosts.vllm.core import Core
from service.hosts.vllm.drafting import Bounds
from service.hosts.vllm.expansion import mend
from service.hosts.vllm.requests import Request
from service.origin import Origin
from service.recording import record_of
from storage.config import read
from storage.records import FeedbackRecord

GIB = 2**30
LATE = 10  # of multiprocessing's finalizers: before its queues are closed

log = structlog.get_logger()


class Proposer:
    """Named in --speculative-config. vLLM makes it, calls `load_model` once, and `propose` in every step."""

    def __init__(self, vllm_config: Any) -> None:
        """Raises `SamplingBroken` only: vLLM would then serve garbage, whatever is proposed, and nobody would know."""
        mend(importlib.import_module("vllm.v1.sample.rejection_sampler"), vllm_config.device_config.device)
        self._guard = Guard(LossyConfig(), UNSEEN)
        self._core: Core | None = None
        self._attachment: Attachment | None = None
        self._ngrams: Ngrams | None = None
        try:
            self._build(vllm_config)
        except Exception:
            self._core = self._attachment = None
            log.exception("vllm.not_started", decoding="plain")

    def load_model(self, target: object) -> None:
        """vLLM has loaded the target: look for the drafter from now on."""
        if self._attachment is not None:
            self._attachment.start()

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: Any,
        token_ids_cpu: Any,
        slot_mappings: object = None,
    ) -> list[list[int]]:
        """A chain for each row that this step gave a token; the arrays are longer than the batch."""
        if self._core is not None:
            try:
                return self._core.step(sampled_token_ids, num_tokens_no_spec, token_ids_cpu)
            except Exception as error:
                self._core.fault("propose", error)
        return [[] for _ in sampled_token_ids]

    def close(self) -> None:
        """Sign off, and write what feedback is left."""
        if self._attachment is not None:
            self._attachment.close()
        if self._ngrams is not None:
            self._ngrams.stop()
        if self._core is not None and self._core.faults:
            log.warning("vllm.faults", counts=dict(self._core.faults))

    def _build(self, vllm_config: Any) -> None:
        if not _answers():
            return
        config, model = read(HostConfig, os.environ), vllm_config.model_config
        self._guard = Guard(read(LossyConfig, os.environ), lossy.vllm(vars(vllm_config.speculative_config)))
        if config.fallback == "ngram":
            self._ngrams = Ngrams.of(model.get_vocab_size(), torch.device("cpu"), config.ngram_tokens)
        fallback = None if self._ngrams is None else self._ngrams.resident
        floor, governor = read(FloorConfig, os.environ), read(GovernorConfig, os.environ)
        core = Core(bounds_of(vllm_config, config), self._finished, floor, governor, fallback)
        engine = Engine(
            model.model, model.dtype, vllm_config.device_config.device, _version(), self._guard, core.take, core.hold,
            core.broken,
        )  # fmt: skip
        self._attachment, self._core = Attachment(config, engine), core
        runner.listen(importlib.import_module("vllm.v1.worker.gpu_model_runner").GPUModelRunner, self._begins)
        Finalize(None, self.close, exitpriority=LATE)

    def _begins(self, of: Any, scheduled: Any) -> None:
        """A step of some runner in this process begins."""
        if self._core is None or getattr(of, "drafter", None) is not self:
            return
        try:
            self._core.begins(of, scheduled)
        except Exception as error:
            self._core.fault("step", error)

    def _finished(self, request: Request) -> None:
        """A request ended: its record is written, and n-grams may be found in its output."""
        generation = request.generation
        if self._ngrams is not None and generation.train:
            self._ngrams.finished(generation)
        attached = self._attachment.attached if self._attachment is not None else None
        if attached is not None and generation.output_ids:
            attached.writer.put(record(request, attached.origin, self._guard.lossless))


def record(request: Request, origin: Origin, lossless: bool) -> FeedbackRecord:
    """A finished request's feedback. vLLM shows a proposer no logits: the worker reads the tokens again."""
    made = record_of(request.generation, origin)
    return msgspec.structs.replace(
        made,
        source=SOURCE,
        structured=request.structured,
        adjusted=made.adjusted or request.adjusted,
        lossless=made.lossless and lossless,
    )


def bounds_of(vllm_config: Any, config: HostConfig) -> Bounds:
    scheduler = vllm_config.scheduler_config
    return Bounds(
        rows=scheduler.max_num_seqs,
        context=vllm_config.model_config.max_model_len,
        draft_length=vllm_config.speculative_config.num_speculative_tokens,
        reading=scheduler.max_num_batched_tokens,
        bytes=round(config.kv_memory * GIB),
    )


def _answers() -> bool:
    """Whether it is this worker's proposals that vLLM asks for: those of the first of several that share the target."""
    first: bool = importlib.import_module("vllm.distributed").get_tensor_model_parallel_rank() == 0
    return first


def _version() -> str:
    version: str = importlib.import_module("vllm").__version__
    return version
