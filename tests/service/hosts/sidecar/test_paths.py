"""Which of an engine's paths are for clients."""

import pytest

from service.hosts.sidecar.dialects import DIALECTS
from service.hosts.sidecar.paths import passes

VLLM = DIALECTS["vllm"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/models", "/health", "/metrics", "/tokenize", "/"])
@pytest.mark.parametrize("steered", [False, True])
@pytest.mark.parametrize("reachable", [False, True])
def test_clients_paths_always_pass(path: str, steered: bool, reachable: bool) -> None:
    assert passes(path, VLLM, steered, reachable)


@pytest.mark.parametrize(
    "path", ["/collective_rpc", "/weight_checker", "/update_weights", "/reset_prefix_cache", "/sleep/x"]
)
def test_control_paths_pass_only_on_this_machine_and_where_the_sidecar_does_not_use_them(path: str) -> None:
    assert passes(path, VLLM, steered=False, reachable=False)
    assert not passes(path, VLLM, steered=False, reachable=True)
    assert not passes(path, VLLM, steered=True, reachable=False)


def test_a_path_that_nobody_knows_passes_unless_the_sidecar_steers_the_engine() -> None:
    assert passes("/brand_new_control", VLLM, steered=False, reachable=True)
    assert not passes("/brand_new_control", VLLM, steered=True, reachable=True)


def test_before_the_engine_is_known_a_steered_one_has_only_clients_paths() -> None:
    assert passes("/v1/models", None, steered=True, reachable=True)
    assert not passes("/collective_rpc", None, steered=True, reachable=True)
