"""The push protocol against control routes that behave as SGLang's sources say, with the real loader behind them."""

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from service.hosts.loopback import EngineTrouble, NotLoopback
from service.hosts.sglang import SglangPush, SglangPushConfig
from service.hosts.sglang_plugin import loader
from service.hosts.sglang_plugin.pointer import PointerConfig
from service.hosts.swapping import SwapFailed
from storage.registry import Version
from tests.service.hosts.sglang.fake_sglang import FakeSglang, install_context, served

SESSION = ["/pause_generation", "/begin_weight_update", "/update_weights_from_tensor", "/end_weight_update"]


def version(number: int) -> Version:
    return Version(number, "chat", number, None, "0" * 64, 1, datetime.now(UTC), None)


def checkpoint(folder: Path, number: float, **tensors: torch.Tensor) -> Path:
    path = folder / f"v{number}"
    path.mkdir(exist_ok=True)
    save_file({"a": torch.full((2,), number), "b": torch.ones(2), **tensors}, path / "model.safetensors")
    return path


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeSglang]:
    monkeypatch.setenv("REDRAFT_SGLANG_POINTER", str(tmp_path / "pointer.json"))
    monkeypatch.setattr(loader, "_loaded", loader.NOBODY)
    install_context()
    made = FakeSglang()
    with served(made):
        yield made


@pytest.fixture
def push(engine: FakeSglang, tmp_path: Path) -> Iterator[SglangPush]:
    made = SglangPush(engine.url, SglangPushConfig(), PointerConfig(tmp_path / "pointer.json"))
    yield made
    made.close()


def test_a_version_is_loaded_in_a_session_of_the_draft_alone(
    push: SglangPush, engine: FakeSglang, tmp_path: Path
) -> None:
    push.swap(version(1), checkpoint(tmp_path, 1))
    assert engine.draft.weights["a"].tolist() == [1, 1]
    assert engine.target.weights["a"].tolist() == [0, 0]
    assert [call for call in engine.calls if call in SESSION] == SESSION
    assert engine.calls[-2:] == ["/flush_cache", "/continue_generation"]
    assert (engine.paused, engine.open, engine.version) == (False, False, "chat/1")
    assert loader.loaded().version == 1


def test_what_is_served_already_is_not_pushed_again(push: SglangPush, engine: FakeSglang, tmp_path: Path) -> None:
    push.swap(version(1), checkpoint(tmp_path, 1))
    engine.calls.clear()
    push.swap(version(1), checkpoint(tmp_path, 1))
    assert engine.calls == ["/weights_checker"]


def test_an_engine_that_was_started_again_is_pushed_to_again(
    push: SglangPush, engine: FakeSglang, tmp_path: Path
) -> None:
    push.swap(version(1), checkpoint(tmp_path, 1))
    engine.draft.weights["a"] = torch.zeros(2)
    push.swap(version(1), checkpoint(tmp_path, 1))
    assert engine.draft.weights["a"].tolist() == [1, 1]


def test_a_file_that_fits_in_part_only_ends_in_the_version_before(
    push: SglangPush, engine: FakeSglang, tmp_path: Path
) -> None:
    push.swap(version(1), checkpoint(tmp_path, 1))
    with pytest.raises(SwapFailed, match=r"version 2 .*KeyError.*in part.*serves version 1 again"):
        push.swap(version(2), checkpoint(tmp_path, 2, zz=torch.ones(1)))
    assert engine.draft.weights["a"].tolist() == [1, 1]
    assert not engine.paused
    assert loader.loaded().version == 1


def test_numbers_that_are_not_finite_never_reach_the_model(
    push: SglangPush, engine: FakeSglang, tmp_path: Path
) -> None:
    push.swap(version(1), checkpoint(tmp_path, 1))
    with pytest.raises(SwapFailed, match="not finite; nothing was touched"):
        push.swap(version(2), checkpoint(tmp_path, float("nan")))
    assert engine.draft.weights["a"].tolist() == [1, 1]


def test_where_the_version_before_cannot_be_loaded_either_the_message_says_so(
    push: SglangPush, engine: FakeSglang, tmp_path: Path
) -> None:
    push.swap(version(1), checkpoint(tmp_path, 1))
    engine.draft.fail_after = 1
    with pytest.raises(SwapFailed, match=r"nor was version 1.*start it again"):
        push.swap(version(2), checkpoint(tmp_path, 2))
    assert not engine.paused


def test_a_target_that_changed_is_not_served(push: SglangPush, engine: FakeSglang, tmp_path: Path) -> None:
    engine.touch_target = True
    with pytest.raises(SwapFailed, match=r"target's weights changed.*left paused"):
        push.swap(version(1), checkpoint(tmp_path, 1))
    assert engine.paused
    with pytest.raises(SwapFailed, match="not what it was"):
        push.recover()
    assert engine.paused


@pytest.mark.parametrize("path", ["/pause_generation", "/begin_weight_update", "/update_weights_from_tensor"])
def test_an_engine_that_refuses_a_step_goes_on(path: str, push: SglangPush, engine: FakeSglang, tmp_path: Path) -> None:
    push.swap(version(1), checkpoint(tmp_path, 1))
    engine.refuse = path
    with pytest.raises(SwapFailed, match="version 2 was not loaded"):
        push.swap(version(2), checkpoint(tmp_path, 2))
    assert not engine.paused
    engine.refuse = ""
    push.swap(version(2), checkpoint(tmp_path, 2))
    assert engine.draft.weights["a"].tolist() == [2, 2]


def test_an_engine_without_the_plugin_is_told_apart(
    push: SglangPush, engine: FakeSglang, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "load", lambda body: None)
    with pytest.raises(SwapFailed, match=r"0 of 1 ranks.*--custom-weight-loader"):
        push.swap(version(1), checkpoint(tmp_path, 1))
    assert not engine.paused


def test_an_engine_that_a_push_was_cut_off_in_goes_on(push: SglangPush, engine: FakeSglang, tmp_path: Path) -> None:
    engine.paused = engine.open = True
    (tmp_path / "pointer.push").write_text("under way")
    push.recover()
    assert (engine.paused, engine.open) == (False, False)
    push.swap(version(1), checkpoint(tmp_path, 1))
    assert loader.loaded().version == 1


def test_an_engine_that_is_away_is_not_changed(tmp_path: Path) -> None:
    push = SglangPush("http://127.0.0.1:9", SglangPushConfig(), PointerConfig(tmp_path / "pointer.json"))
    with pytest.raises(SwapFailed, match=r"no answer.*nothing was changed"):
        push.swap(version(1), checkpoint(tmp_path, 1))
    with pytest.raises(EngineTrouble):
        push.control.ranks()


@pytest.mark.parametrize(
    "url", ["http://10.0.0.5:8000", "http://sglang:8000", "https://127.0.0.1:8000", "http://0.0.0.0:8000"]
)
def test_an_engine_that_is_not_on_loopback_is_refused(url: str) -> None:
    with pytest.raises(NotLoopback, match="can change every weight"):
        SglangPush(url)
