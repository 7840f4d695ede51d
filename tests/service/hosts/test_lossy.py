"""The guard against lossy engines: settings as engines spell them, and greedy answers that are not the target's."""

import msgspec
import numpy as np
import pytest

from service.hosts.capabilities import host_of
from service.hosts.lossy import (
    CLEAN_TOKENS,
    Guard,
    LossyConfig,
    Seen,
    llamacpp,
    llamacpp_command,
    sglang_server,
    vllm,
    vllm_server,
)
from storage.records import FeedbackRecord, TeacherRows, int32
from storage.validation import contradicted
from tests.storage.rows import make_record


@pytest.mark.parametrize("given", [
    None, {}, {"rejection_sample_method": "standard"},
    {"rejection_sample_method": "block", "synthetic_acceptance_rates": None},
])  # fmt: skip
def test_vllm_with_an_exact_rule_is_lossless(given: dict[str, object] | None) -> None:
    assert vllm(given) == Seen(True)


@pytest.mark.parametrize(("given", "named"), [
    ({"rejection_sample_method": "fly"}, "rejection_sample_method=fly"),
    ({"rejection_sample_method": "synthetic"}, "rejection_sample_method=synthetic"),
    ({"rejection_sample_method": "one of tomorrow's"}, "rejection_sample_method=one of tomorrow's"),
    ({"synthetic_acceptance_rates": [0.9, 0.8]}, "synthetic_acceptance_rates=[0.9, 0.8]"),
    ({"spec_decoding_acceptance_method": "typical_acceptance_sampler"},
     "spec_decoding_acceptance_method=typical_acceptance_sampler"),
])  # fmt: skip
def test_vllm_with_another_rule_is_lossy_by_name(given: dict[str, object], named: str) -> None:
    assert named in vllm(given).lossy


def test_a_vllm_server_tells_its_configuration_in_development_mode_only() -> None:
    told = {"vllm_config": {"speculative_config": {"rejection_sample_method": "fly"}}}
    assert vllm_server(told).lossy == ("rejection_sample_method=fly",)
    assert vllm_server({"vllm_config": {"speculative_config": None}}) == Seen(True)
    assert not vllm_server({"detail": "Not Found"}).known


def test_a_threshold_that_sglang_was_given_while_it_ran_counts() -> None:
    started = {"speculative_accept_threshold_single": 1.0, "speculative_accept_threshold_acc": 1.0}
    assert sglang_server({**started, "internal_states": [started]}) == Seen(True)
    set_later = {**started, "speculative_accept_threshold_acc": 0.5}
    assert sglang_server({**started, "internal_states": [set_later]}).lossy == ("speculative_accept_threshold_acc=0.5",)
    assert not sglang_server({"version": "0.5"}).known


def test_llama_cpp_with_synthetic_acceptance_is_lossy_and_without_a_word_of_it_unknown() -> None:
    told = {"default_generation_settings": {"params": {"speculative.synth_len": 2.5, "speculative.n_max": 3}}}
    assert llamacpp(told) == Seen(True, ("synth_len=2.5",))
    assert llamacpp({"params": {"speculative.synth_len": -1.0, "speculative.synth_rates": []}}) == Seen(True)
    assert not llamacpp({"default_generation_settings": {"params": {"speculative.n_max": 3}}}).known


def test_the_command_that_starts_llama_cpp_tells_all() -> None:
    assert llamacpp_command("llama-server -m target.gguf --spec-type draft-simple --port {port}") == Seen(True)
    assert llamacpp_command("llama-server --spec-synth-len 3").lossy == ("--spec-synth-len",)


def greedy(tokens: int, wrong: int) -> FeedbackRecord:
    """An answer whose first `wrong` tokens are not those that its rows find likeliest."""
    output = np.arange(tokens) + 10
    ids = np.stack([output, output + 1], axis=1)
    ids[:wrong] += 5  # what was said is not among the two
    log_probs = np.tile(np.log([0.9, 0.05]), (tokens, 1)).astype("<f2")
    rows = TeacherRows(2, int32(np.arange(tokens)), ids.astype("<i4").tobytes(), log_probs.tobytes(),
                       np.full(tokens, np.log(0.05), "<f4").tobytes())  # fmt: skip
    return msgspec.structs.replace(make_record("a", tokens=0), output_ids=int32(output), teacher=rows)


def test_an_engine_of_which_nothing_is_known_counts_as_lossy_until_its_greedy_answers_have_shown_enough() -> None:
    guard = Guard()
    assert (guard.losslessness, guard.lossless) == ("unknown", False)
    guard.answered(greedy(CLEAN_TOKENS - 1, wrong=0))
    assert not guard.lossless
    guard.answered(greedy(1, wrong=0))
    assert (guard.losslessness, guard.lossless) == ("lossless", True)


def test_greedy_answers_that_are_not_the_targets_make_an_engine_lossy_whatever_its_settings_say() -> None:
    guard = Guard(seen=Seen(True))
    guard.answered(greedy(400, wrong=2))
    assert guard.lossless, "two near-ties are rounding"
    guard.answered(greedy(100, wrong=20))
    assert guard.losslessness == "lossy"
    assert guard.settings == ("22 of 500 greedy tokens are not the target's own",)


@pytest.mark.parametrize("change", [{"temperature": 0.7}, {"structured": True}, {"adjusted": True}, {"train": False}])
def test_only_plain_greedy_answers_say_anything(change: dict[str, object]) -> None:
    assert contradicted(msgspec.structs.replace(greedy(50, wrong=50), **change)) == (0, 0)
    assert contradicted(greedy(50, wrong=50)) == (50, 50)
    assert contradicted(make_record("no rows")) == (0, 0)


def test_what_the_operator_states_has_the_last_word() -> None:
    assert Guard(LossyConfig("yes"), Seen(True, ("rejection_sample_method=fly",))).lossless
    refused = Guard(LossyConfig("no"), Seen(True))
    assert not refused.lossless
    assert refused.settings == ("REDRAFT_ENGINE_LOSSLESS=no",)


def test_settings_are_kept_when_the_engine_falls_silent_and_forgotten_when_it_restarts() -> None:
    guard = Guard()
    guard.saw(Seen(True))
    guard.saw(Seen(False))
    assert guard.lossless
    guard.restarted()
    assert guard.losslessness == "unknown"


def test_what_is_known_of_an_engine_that_redraft_starts_itself_holds_for_the_next_process_too() -> None:
    guard = Guard(seen=Seen(True))
    guard.saw(Seen(True, ("synth_len=2",)))
    guard.restarted()
    assert guard.lossless


def test_the_capabilities_that_a_host_reports_carry_what_was_found() -> None:
    found = Guard(seen=Seen(True, ("rejection_sample_method=fly",))).applied(host_of("sidecar_vllm").capabilities)
    assert (found.losslessness, found.lossy_settings) == ("lossy", ("rejection_sample_method=fly",))
    assert found.kinds == ("causal_lm",)
