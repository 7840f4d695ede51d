"""What each engine is asked for besides, so that its answer tells what its drafter did. Plain data.

Which of it an engine of some version really answers, and how an answer looks where nothing was asked for, is found out
at the start (probe); nothing here is believed.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

Engine = Literal["vllm", "sglang", "llamacpp", "redraft", "unknown"]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@dataclass(frozen=True, order=True)
class Form:
    """One of the ways in which an engine answers."""

    path: str
    stream: bool

    @property
    def chat(self) -> bool:
        return self.path == CHAT

    def __str__(self) -> str:
        return f"{self.path}{' as a stream' if self.stream else ''}"


FORMS: Final = tuple(Form(path, stream) for path in (CHAT, COMPLETIONS) for stream in (False, True))


@dataclass(frozen=True)
class Dialect:
    """How one engine is asked. Log-probabilities are asked for apart, because they cost it the most."""

    engine: Engine
    chat: Mapping[str, Any] = field(default_factory=dict)
    completions: Mapping[str, Any] = field(default_factory=dict)
    usage: bool = False  # of a stream: the figures come with its usage
    top_k: bool = False  # log-probabilities name tokens by id
    identities: bool = False  # token ids stand in the log-probabilities, and nowhere else
    control: tuple[str, ...] = ()  # paths that steer the engine: not for clients
    fillers: Literal["", "empty", "bare"] = ""  # chunks that a stream has only because of the additions: see stripping
    lacking: str = ""  # what this engine never tells

    def asks(self, form: Form, top_k: int) -> dict[str, Any]:
        """The fields of a request that is observed; `top_k` 0: no log-probabilities."""
        fields = dict(self.chat if form.chat else self.completions)
        wanted = top_k if self.top_k else int(self.identities)
        if wanted:
            fields |= {"logprobs": True, "top_logprobs": wanted} if form.chat else {"logprobs": wanted}
        return fields


_IDS: Final = {"return_token_ids": True, "return_tokens_as_token_ids": True}

DIALECTS: Final[Mapping[Engine, Dialect]] = {
    dialect.engine: dialect
    for dialect in (
        Dialect(
            "vllm",
            _IDS,
            _IDS,
            usage=True,
            top_k=True,
            fillers="bare",
            control=(
                "/collective_rpc", "/init_weight_transfer_engine", "/start_weight_update", "/start_draft_weight_update",
                "/update_weights", "/finish_weight_update", "/update_weight_version", "/weight_checker", "/weight_info",
                "/shutdown_weight_transfer_engine", "/pause", "/resume", "/is_paused", "/abort_requests", "/sleep",
                "/wake_up", "/is_sleeping", "/reset_prefix_cache", "/reset_mm_cache", "/reset_encoder_cache",
                "/server_info", "/get_world_size", "/scale_elastic_ep",
            ),
        ),
        Dialect(
            "redraft",
            {**_IDS, "return_metrics": True},
            {**_IDS, "return_metrics": True},
            top_k=True,
            fillers="empty",
        ),
        Dialect(
            "sglang",
            {
                "return_input_ids_in_sglext": True,
                "return_output_ids_in_sglext": True,
                "return_spec_tokens_details": True,
            },
            {"return_token_ids": True, "return_spec_tokens_details": True},
            control=(
                "/begin_weight_update", "/end_weight_update", "/update_weights_from_disk",
                "/update_weights_from_tensor", "/update_weights_from_distributed", "/update_weights_from_ipc",
                "/init_weights_update_group", "/destroy_weights_update_group", "/weights_checker", "/pause_generation",
                "/continue_generation", "/flush_cache", "/set_internal_state", "/release_memory_occupation",
                "/resume_memory_occupation", "/add_external_corpus", "/load_lora_adapter", "/unload_lora_adapter",
            ),
            lacking="SGLang tells totals of a request, not which of its rounds refused what, and no target "
            "probabilities by token id: set REDRAFT_TEACHER=rescored for the worker",
        ),
        Dialect(
            "llamacpp",
            identities=True,
            control=("/models/load", "/models/unload", "/lora-adapters"),
            lacking="llama.cpp tells totals only: acceptance comes from its /metrics, rounds and target probabilities "
            "from nowhere; set REDRAFT_TEACHER=rescored for the worker",
        ),
        Dialect("unknown", lacking="this engine is not known here: requests pass, and nothing is observed"),
    )
}  # fmt: skip
