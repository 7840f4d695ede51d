"""A push into a running vLLM: what the engine serves afterwards, whatever goes wrong on the way."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from sqlalchemy.exc import OperationalError

from service.hosts.loopback import NotLoopback
from service.hosts.swapping import SwapFailed
from service.hosts.vllm_push import VllmPush, VllmPushConfig, control
from storage.pushes import Pushes
from tests.service.hosts.vllm_push.conftest import FIRST, QUICK, SECOND, START, PushRig
from tests.service.hosts.vllm_push.vllm_like import VllmLike

SESSION = (
    "/pause", "redraft_speculate", "/start_draft_weight_update", "/update_weights", "/finish_weight_update",
    "redraft_verify", "redraft_target", "redraft_speculate", "/resume",
)  # fmt: skip


def test_a_version_is_served_whole_and_under_its_name(rig: PushRig) -> None:
    rig.swap(1)
    assert rig.vllm.worker.holds(FIRST)
    assert rig.vllm.label == "chat/1"
    assert rig.vllm.speculating
    assert not rig.vllm.paused
    assert rig.states() == ["pushing", "paused", "loaded", "verified", "active"]


def test_generation_stands_still_and_speculation_is_off_before_the_draft_is_touched(rig: PushRig) -> None:
    rig.swap(1)
    calls = rig.vllm.calls
    begun = calls.index("/start_draft_weight_update")
    assert calls.index("/pause") < calls.index("redraft_speculate") < begun
    assert calls.index("redraft_check") < calls.index("/pause")
    assert calls.index("/reset_prefix_cache") < calls.index("/resume")
    assert rig.vllm.resets == 1


def test_a_version_that_is_served_already_is_not_pushed_again(rig: PushRig) -> None:
    rig.swap(1)
    rig.vllm.calls.clear()
    rig.swap(1)
    assert rig.vllm.calls == ["redraft_describe"]


def test_weights_that_the_engine_started_with_only_get_their_name(rig: PushRig) -> None:
    rig.swap(1)
    rig.vllm.start = rig.checkpoint(2)
    rig.vllm.restart()
    rig.vllm.calls.clear()
    rig.swap(2)
    assert rig.vllm.label == "chat/2"
    assert "/pause" not in rig.vllm.calls


def test_after_a_restart_of_the_engine_the_same_version_is_pushed_again(rig: PushRig) -> None:
    rig.swap(1)
    rig.vllm.restart()
    assert rig.vllm.worker.holds(START)
    rig.swap(1)
    assert rig.vllm.worker.holds(FIRST)


def test_the_cache_can_be_kept(rig: PushRig) -> None:
    rig.swap(1, rig.push(VllmPushConfig(push_seconds=5, push_reset_cache=False)))
    assert rig.vllm.resets == 0
    assert rig.pushes.steps(rig.vllm.url, 1)[0].detail == "the prefix cache was kept"


def test_a_cache_that_cannot_be_reset_fails_nothing(rig: PushRig) -> None:
    rig.vllm.faults = {"/reset_prefix_cache": ["refuse"]}
    rig.swap(1)
    assert rig.vllm.worker.holds(FIRST)
    assert "could not be reset" in rig.pushes.steps(rig.vllm.url, 1)[0].detail


@pytest.mark.parametrize("fault", ["refuse", "cut", "lose"])
@pytest.mark.parametrize("step", range(len(SESSION)), ids=lambda i: f"{i}{SESSION[i].replace('/', '-')}")
def test_a_push_that_fails_once_anywhere_ends_in_the_version_before(rig: PushRig, step: int, fault: str) -> None:
    rig.swap(1)
    _fail(rig.vllm, step, fault, times=1)
    with pytest.raises(SwapFailed, match=r"chat/2 was not served.*serves chat/1 again"):
        rig.swap(2)
    assert _served_well(rig.vllm, FIRST)
    assert rig.states()[-1] == "restored"
    rig.swap(2)
    assert _served_well(rig.vllm, SECOND)


@pytest.mark.parametrize("fault", ["refuse", "cut", "lose"])
@pytest.mark.parametrize("step", range(2, 6), ids=lambda i: SESSION[i].replace("/", ""))
def test_where_the_version_before_cannot_be_brought_back_the_engine_decodes_plainly(
    rig: PushRig, step: int, fault: str
) -> None:
    rig.swap(1)
    _fail(rig.vllm, step, fault, times=9)
    with pytest.raises(SwapFailed, match=r"chat/2 was not served.*then chat/1.*decodes without speculation"):
        rig.swap(2)
    assert (rig.vllm.dead, rig.vllm.paused, rig.vllm.speculating) == (False, False, False)
    assert rig.states()[-1] == "off"
    rig.vllm.faults = {}
    rig.swap(2)
    assert _served_well(rig.vllm, SECOND)


def test_without_a_version_before_the_checkpoint_of_the_start_is_brought_back(rig: PushRig) -> None:
    rig.vllm.faults = {"/finish_weight_update": ["refuse"]}
    with pytest.raises(SwapFailed, match="serves default again"):
        rig.swap(1)
    assert _served_well(rig.vllm, START)
    assert rig.vllm.label == "default"


def test_a_worker_that_loads_something_else_is_found_out(rig: PushRig) -> None:
    rig.swap(1)
    _once(rig.vllm, lambda vllm: vllm.worker.draft.model.qkv_proj.pack(torch.zeros(16, 8)))
    with pytest.raises(SwapFailed, match=r"is not what was loaded: model\.q_proj\.weight.*serves chat/1 again"):
        rig.swap(2)
    assert _served_well(rig.vllm, FIRST)


def test_a_target_that_a_push_changes_is_loaded_again(rig: PushRig) -> None:
    rig.swap(1)
    before = rig.vllm.worker.redraft_target("0")
    _once(rig.vllm, lambda vllm: vllm.worker.target.model.norm.weight.data.mul_(2))
    rig.swap(2)
    assert rig.vllm.worker.redraft_target("0") == before
    assert "reload_weights" in rig.vllm.calls


def test_an_engine_whose_target_cannot_be_brought_back_answers_nothing_more(rig: PushRig) -> None:
    rig.swap(1)
    rig.vllm.on_load = lambda vllm: vllm.worker.target.model.norm.weight.data.mul_(2)
    rig.vllm.worker.reload_weights = lambda: None  # type: ignore[method-assign]
    with pytest.raises(SwapFailed, match=r"target's weights were changed.*left paused: restart it now"):
        rig.swap(2)
    assert rig.vllm.paused


def test_a_damaged_checkpoint_never_pauses_the_engine(rig: PushRig) -> None:
    rig.swap(1)
    folder = rig.checkpoint(2)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    rig.vllm.calls.clear()
    with pytest.raises(SwapFailed, match=r"is no safetensors file.*not touched and serves chat/1"):
        rig.push().swap(rig.versions[1], folder)
    assert "/pause" not in rig.vllm.calls
    assert rig.states()[-1] == "refused"
    rig.swap(1)


def test_a_missing_checkpoint_touches_nothing(rig: PushRig) -> None:
    with pytest.raises(SwapFailed, match=r"cannot be copied .*\. The engine was not touched"):
        rig.push().swap(rig.versions[0], rig.folder / "nowhere")


def test_a_version_that_keeps_failing_is_not_tried_for_ever(rig: PushRig) -> None:
    rig.swap(1)
    push = rig.push()
    rig.vllm.on_load = lambda vllm: (
        vllm.worker.draft.model.norm.weight.data.mul_(2) if not vllm.worker.holds(FIRST) else None
    )
    for _ in range(3):
        with pytest.raises(SwapFailed, match="serves chat/1 again"):
            rig.swap(2, push)
    rig.vllm.calls.clear()
    with pytest.raises(SwapFailed, match=r"failed 3 times.*not tried again.*serves chat/1"):
        rig.swap(2, push)
    assert "/pause" not in rig.vllm.calls


@pytest.mark.parametrize("state", ["pushing", "paused", "loaded", "verified"])
def test_a_pusher_that_dies_leaves_an_engine_that_goes_on_and_the_next_start_puts_it_right(
    rig: PushRig, state: str
) -> None:
    rig.swap(1)
    with pytest.raises(_Killed):
        rig.swap(2, _dying(rig, state))
    assert (rig.vllm.dead, rig.vllm.paused) == (False, False)
    if state != "pushing":
        assert not rig.vllm.speculating
    rig.push().recover()
    assert _served_well(rig.vllm, FIRST)
    assert rig.states()[-1] == "restored"
    rig.swap(2)
    assert _served_well(rig.vllm, SECOND)


def test_a_pusher_that_dies_while_it_goes_back_is_put_right_too(rig: PushRig) -> None:
    rig.swap(1)
    rig.vllm.faults = {"/finish_weight_update": ["refuse"]}
    with pytest.raises(_Killed):
        rig.swap(2, _dying(rig, "restoring"))
    rig.push().recover()
    assert _served_well(rig.vllm, FIRST)


def test_an_engine_that_was_restarted_after_a_crash_needs_no_repair(rig: PushRig) -> None:
    rig.swap(1)
    with pytest.raises(_Killed):
        rig.swap(2, _dying(rig, "loaded"))
    rig.vllm.restart()
    rig.vllm.calls.clear()
    rig.push().recover()
    assert "/pause" not in rig.vllm.calls
    assert rig.states()[-1] == "restored"
    rig.swap(2)
    assert _served_well(rig.vllm, SECOND)


def test_a_start_with_nothing_to_put_right_touches_nothing(rig: PushRig) -> None:
    rig.push().recover()
    assert rig.vllm.calls == ["redraft_describe"]


def test_an_engine_that_is_away_is_said_to_be(rig: PushRig) -> None:
    rig.vllm.close()
    with pytest.raises(SwapFailed, match="is not reached"):
        rig.swap(1)


def test_an_engine_without_the_plugin_is_told_how_to_start_it(rig: PushRig) -> None:
    rig.vllm.faults = {"redraft_describe": ["refuse"]}
    with pytest.raises(SwapFailed, match="--worker-extension-cls"):
        rig.swap(1)


def test_two_pushers_of_one_engine_keep_out_of_each_others_way(rig: PushRig) -> None:
    first, second = rig.push(), rig.push()
    with first._alone(), pytest.raises(SwapFailed, match="another process is pushing"):
        rig.swap(1, second)


@pytest.mark.parametrize(
    "url", ["http://10.0.0.5:8000", "http://vllm:8000", "https://127.0.0.1:8000", "http://0.0.0.0:8000"]
)
def test_an_engine_that_is_not_on_loopback_is_refused(rig: PushRig, url: str) -> None:
    with pytest.raises(NotLoopback, match="not on loopback"):
        VllmPush(url, rig.pushes, rig.folder)


def test_an_engine_that_answers_on_another_address_of_the_machine_is_refused(
    rig: PushRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "_own_addresses", lambda: {"127.0.0.1"})  # stands for one that others reach
    with pytest.raises(SwapFailed, match=r"start vLLM with --host 127\.0\.0\.1"):
        rig.swap(1)
    assert "redraft_describe" not in rig.vllm.calls


def test_without_a_database_no_push_begins(rig: PushRig) -> None:
    with pytest.raises(SwapFailed, match="database is away"):
        rig.swap(1, _noting(rig, "pushing", OperationalError("", {}, Exception())))
    assert "/pause" not in rig.vllm.calls


@pytest.mark.parametrize("state", ["paused", "loaded", "verified", "active"])
def test_a_database_that_goes_away_in_the_middle_stops_nothing(rig: PushRig, state: str) -> None:
    rig.swap(1, _noting(rig, state, OperationalError("", {}, Exception())))
    assert _served_well(rig.vllm, FIRST)


def test_only_the_version_served_and_the_one_before_are_kept(rig: PushRig) -> None:
    for number in (1, 2, 1, 2):
        rig.swap(number)
    assert len(list((rig.folder / "staging").rglob("*.safetensors"))) == 2


def _fail(vllm: VllmLike, step: int, fault: str, times: int) -> None:
    """Have this step of the session fail; of calls that are made earlier too, those pass."""
    name = SESSION[step]
    skipped = SESSION[:step].count(name) + (name == "redraft_target")
    vllm.faults = {name: [""] * skipped + [fault] * times}


def _once(vllm: VllmLike, harm: Callable[[VllmLike], object]) -> None:
    def first(engine: VllmLike) -> None:
        engine.on_load = lambda engine: None
        harm(engine)

    vllm.on_load = first


def _served_well(vllm: VllmLike, seed: int) -> bool:
    alive = not (vllm.dead or vllm.paused or vllm.session or vllm.homeless)
    return alive and vllm.speculating and vllm.worker.holds(seed)


class _Killed(BaseException):
    """Nothing of the pusher runs after this but its guard, a process of its own."""


def _dying(rig: PushRig, state: str) -> VllmPush:
    """A pusher that is killed right after it noted `state`."""
    return _noting(rig, state, _Killed())


def _noting(rig: PushRig, state: str, ends_in: BaseException) -> VllmPush:
    """A pusher to whom this happens as soon as it has noted `state`."""

    class Faulty(Pushes):
        def note(self, endpoint: str, engine: str, now: str, *rest: Any, **more: Any) -> None:
            super().note(endpoint, engine, now, *rest, **more)
            if now == state:
                raise ends_in

    push = VllmPush(rig.vllm.url, Faulty(rig.database), rig.folder / "staging", QUICK)
    rig.opened.append(push)
    return push
