"""What redraft relies on in SGLang, held against its wheel's sources: SGLang itself cannot run here.

`make test-contracts` fetches the wheel and runs this; a failure names what moved.
"""

import base64
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace

import pytest

from service.hosts.sglang.control import NO_TENSORS
from service.hosts.sglang_plugin import SETTLED, VERIFIED, register
from tests.contracts.reading import Moved
from tests.contracts.wheels import wheel

SRT = "sglang/srt"
PROCESSOR = f"{SRT}/managers/scheduler_components/batch_result_processor.py"
IO = f"{SRT}/managers/io_struct.py"
SERVER = f"{SRT}/entrypoints/http_server.py"
MANAGER = f"{SRT}/managers/scheduler_components/weight_updater.py"
UPDATER = f"{SRT}/model_executor/model_runner_components/weight_updater.py"
SPEC_WORKER = f"{SRT}/speculative/base_spec_worker.py"
REQ = f"{SRT}/managers/schedule_batch.py"

CONTRACTS = [
    # the observer
    (f"{SRT}/plugins/__init__.py", "text GENERAL_PLUGINS_GROUP = \"sglang.srt.plugins\""),
    (f"{SRT}/plugins/__init__.py", "text HookRegistry.apply_hooks()"),
    (f"{SRT}/plugins/hook_registry.py", "HookRegistry.register(cls, target, hook, hook_type)"),
    (PROCESSOR, "SchedulerBatchResultProcessor._resolve_spec_v2_tokens(self, result, batch)"),
    (PROCESSOR, "SchedulerBatchResultProcessor._handle_finish_state_updated_req(...)"),
    (PROCESSOR, "text self._handle_finish_state_updated_req(req, batch, result, i, logits_output)"),
    (PROCESSOR, "text result.num_correct_drafts_per_req_cpu = ["),
    (PROCESSOR, "text next_token_ids = self._resolve_spec_v2_tokens(result, batch)"),
    (PROCESSOR, "text req.output_ids.extend(next_token_id)"),
    (PROCESSOR, "text req.update_finish_state(new_accept_len)"),
    (PROCESSOR, "text if req.is_retracted or req.finished():"),
    (f"{SRT}/managers/utils.py", "GenerationBatchResult.num_correct_drafts_per_req_cpu"),
    *[(REQ, f"Req.{name}") for name in (
        "rid", "origin_input_ids", "output_ids", "output_ids_through_stop", "sampling_params", "finished_reason",
        "grammar", "finished",
    )],
    (REQ, "text is_retracted"),
    (REQ, "BaseFinishReason.to_json(self)"),
    *[(f"{SRT}/sampling/sampling_params.py", f"SamplingParams.{name}") for name in (
        "temperature", "top_p", "top_k", "frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias",
        "custom_params",
    )],
    (f"{SRT}/sampling/sampling_params.py", "text if 0 <= self.temperature < _SAMPLING_EPS:"),
    (f"{SRT}/sampling/sampling_params.py", "text self.top_k = 1"),
    (f"{SRT}/sampling/sampling_params.py", "text TOP_K_ALL = 1 << 30"),
    (f"{SRT}/runtime_context.py", "get_spec()"),
    (f"{SRT}/runtime_context.py", "get_parallel()"),
    (f"{SRT}/runtime_context.py", "get_server_args()"),
    (f"{SRT}/speculative/standalone_worker_v2.py", "text get_spec().speculative_num_steps"),
    # settings that would make it lossy
    (f"{SRT}/speculative/eagle_utils.py", "text get_spec().speculative_accept_threshold_single"),
    (f"{SRT}/speculative/eagle_utils.py", "text get_spec().speculative_accept_threshold_acc"),
    # what the sidecar reads
    *[(f"{SRT}/entrypoints/openai/protocol.py", f"ChatCompletionRequest.{name}") for name in (
        "return_spec_tokens_details", "return_token_ids", "return_input_ids_in_sglext", "return_output_ids_in_sglext",
    )],
    (f"{SRT}/entrypoints/openai/protocol.py", "CompletionRequest.return_spec_tokens_details"),
    (f"{SRT}/entrypoints/openai/protocol.py", "CompletionRequest.return_token_ids"),
    *[(f"{SRT}/entrypoints/openai/protocol.py", name) for name in (
        "SglExt.input_ids", "SglExt.output_ids", "SglExt.spec_tokens_details", "SpecTokensDetails.spec_verify_ct",
        "SpecTokensDetails.spec_num_proposed_drafts", "SpecTokensDetails.spec_num_correct_drafts",
        "SpecTokensDetails.spec_correct_drafts_histogram",
    )],
    *[(f"{SRT}/managers/tokenizer_manager.py", f"text meta_info[\"{name}\"]") for name in (
        "spec_num_correct_drafts", "spec_num_proposed_drafts", "spec_verify_ct", "spec_correct_drafts_histogram",
    )],
    (f"{SRT}/observability/metrics_collector.py", "text sglang:spec_verify_calls_total"),
    (f"{SRT}/observability/metrics_collector.py", "text sglang:spec_accept_length"),
    (f"{SRT}/observability/metrics_collector.py", "text sglang:spec_accept_rate"),
    # the push
    *[(SERVER, f"route {path}") for path in (
        "/server_info", "/flush_cache", "/weights_checker", "/begin_weight_update", "/update_weights_from_tensor",
        "/end_weight_update", "/pause_generation", "/continue_generation",
    )],
    *[(IO, f"UpdateWeightsFromTensorReqInput.{name}") for name in (
        "serialized_named_tensors", "load_format", "flush_cache", "weight_version", "selector",
    )],
    (IO, "text serialized_named_tensors: Annotated[List[bytes], Base64Bytes()]"),
    (IO, "BeginWeightUpdateReqInput.selector"),
    (IO, "text selector: Literal[\"target\", \"draft\", \"all\"] = \"all\""),
    (IO, "CheckWeightsReqInput.action"),
    (IO, "CheckWeightsReqInput.selector"),
    (IO, "ChecksumInfo.per_gpu_checksum"),
    (IO, "PauseGenerationReqInput.mode"),
    (IO, "text \"retract\""),
    (SERVER, "text body[\"ranks\"] = ranks"),
    (MANAGER, "SchedulerWeightUpdaterManager._select_runners(self, selector)"),
    (MANAGER, "text runners += self.draft_worker.weight_update_runners()"),
    (MANAGER, "text success=False, message=\"a weight-update session is already open; \""),
    (MANAGER, "SchedulerWeightUpdaterManager.end_weight_update(self, recv_req)"),
    (UPDATER, "text elif load_format in self.custom_weight_loaders:"),
    (UPDATER, "text custom_loader = dynamic_import(load_format)"),
    (UPDATER, "text custom_loader(self.get_model(), named_tensors)"),
    (f"{SRT}/arg_groups/fields/model.py", "text custom_weight_loader: A["),
    (f"{SRT}/model_executor/model_runner.py", "text custom_weight_loaders=get_model().custom_weight_loader"),
    (SPEC_WORKER, "text return [(\"draft\", runner) for runner in self.draft_worker.draft_runners]"),
    (f"{SRT}/managers/tp_worker.py", "text serialized_named_tensors[get_parallel().tp_rank]"),
    (f"{SRT}/utils/common.py", "text result = server_args.resolved_dict()"),
    (f"{SRT}/server_args.py", "text class ServerArgs"),
    # the drafter's own embedding and head
    (f"{SRT}/speculative/standalone_worker_v2.py", "text doesn't share embeddings/lm_head with target model"),
    (f"{SRT}/models/llama.py", "text config, \"head_dim\", self.hidden_size // self.total_num_heads"),
]  # fmt: skip


@pytest.mark.parametrize(("member", "contract"), CONTRACTS, ids=lambda part: part.rpartition("/")[2][:90])
def test_sglang_is_as_redraft_relies_on_it(member: str, contract: str) -> None:
    wheel("sglang").module(member).holds(contract)


def test_a_contract_that_moved_is_named() -> None:
    with pytest.raises(Moved, match=r"sglang .*batch_result_processor.py: .*takes no nothing any more"):
        wheel("sglang").module(PROCESSOR).holds("SchedulerBatchResultProcessor._resolve_spec_v2_tokens(self, nothing)")
    with pytest.raises(Moved, match=r"no file.py any more"):
        wheel("sglang").module("file.py")
    with pytest.raises(Moved, match="no route /nowhere"):
        wheel("sglang").module(SERVER).holds("route /nowhere")


@pytest.fixture
def registry() -> Iterator[ModuleType]:
    """SGLang's own hook registry, run from its wheel; it needs nothing else of SGLang."""
    name = "sglang.srt.plugins.hook_registry"
    module = ModuleType(name)
    before = dict(sys.modules)
    for parent in ("sglang", "sglang.srt", "sglang.srt.plugins", "sglang.srt.managers"):
        sys.modules[parent] = ModuleType(parent)
    sys.modules[name] = module
    exec(compile(wheel("sglang").module(f"{SRT}/plugins/hook_registry.py").text, name, "exec"), module.__dict__)
    yield module
    for added in sys.modules.keys() - before.keys():
        if added.startswith("sglang"):
            del sys.modules[added]


def test_the_plugin_hangs_itself_on_sglangs_own_hooks(registry: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, object]] = []
    plugin = sys.modules["service.hosts.sglang_plugin"]
    watching = SimpleNamespace(
        verified=lambda batch, result: seen.append(("verified", result)),
        settled=lambda req: seen.append(("settled", req)),
    )
    from service.hosts.sglang_plugin import observer

    monkeypatch.setattr(observer, "observer", lambda: watching)
    module = ModuleType("processor")

    class SchedulerBatchResultProcessor:
        def _resolve_spec_v2_tokens(self, result: object, batch: object) -> list[list[int]]:
            return [[1]]

        def _handle_finish_state_updated_req(
            self, req: object, batch: object, result: object, i: int, out: object
        ) -> None:
            seen.append(("theirs", req))

    path = VERIFIED.rpartition(".")[0].rpartition(".")[0]
    sys.modules["sglang.srt.managers.scheduler_components"] = ModuleType("scheduler_components")
    sys.modules[path] = module
    module.SchedulerBatchResultProcessor = SchedulerBatchResultProcessor  # type: ignore[attr-defined]
    register()
    registry.HookRegistry.apply_hooks()
    processor = SchedulerBatchResultProcessor()
    assert processor._resolve_spec_v2_tokens("result", "batch") == [[1]]
    processor._handle_finish_state_updated_req("req", "batch", "result", 0, None)
    assert seen == [("verified", "result"), ("theirs", "req"), ("settled", "req")]
    assert SETTLED.startswith(path)
    assert plugin.VERIFIED == VERIFIED


def test_the_payload_of_a_push_is_an_empty_list_to_sglang() -> None:
    common = wheel("sglang").module(f"{SRT}/utils/common.py")
    common.holds("text return SafeUnpickler(io.BytesIO(data)).load()")
    common.holds("text return len(data) >= 2 and data[0] == 0x80 and data[1] <= pickle.HIGHEST_PROTOCOL")
    data = base64.b64decode(NO_TENSORS)
    assert (data[0], data[1]) == (0x80, 4)
    assert data[2:] == b"]\x94.", "an empty list, memoized"
