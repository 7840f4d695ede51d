"""The registry: making drafters and versions, finding them, what state they are in and why."""

from pathlib import Path

import pytest
from sqlalchemy import Engine, func, select

from storage.database import reading
from storage.registry import DrafterExists, Registry, UnknownDrafter, UnknownVersion, Version, WrongDrafter
from storage.tables import TrainingRow
from storage.weights import WeightsStore
from storage.windows import Windows
from tests.storage.rows import (
    DIGEST,
    make_candidate,
    make_decision,
    make_drafter,
    make_evaluation,
    make_record,
    make_training,
)


@pytest.fixture
def registry(engine: Engine) -> Registry:
    return Registry(engine)


@pytest.fixture
def store(tmp_path: Path) -> WeightsStore:
    return WeightsStore(tmp_path / "weights")


def test_a_new_drafter_serves_its_first_version(registry: Registry) -> None:
    first = make_drafter(registry)
    pointer = registry.pointer("chat")
    assert (first.number, first.parent, first.window_id) == (1, None, None)
    assert (pointer.live, pointer.previous, pointer.generation) == (first, None, 1)
    assert [(e.kind, e.before, e.after) for e in registry.events("chat")] == [("init", None, 1)]


def test_a_drafter_is_found_as_it_was_made(registry: Registry) -> None:
    make_drafter(registry)
    drafter = registry.drafter("chat")
    assert (drafter.kind, drafter.config) == ("causal_lm", {"layers": 2})
    assert (drafter.target_fingerprint, drafter.tokenizer_fingerprint) == ("target-1", "tokenizer-1")


def test_a_name_is_used_once(registry: Registry) -> None:
    make_drafter(registry)
    with pytest.raises(DrafterExists, match="'chat' already"):
        make_drafter(registry)


def test_an_unknown_drafter_is_answered_with_those_there_are(registry: Registry) -> None:
    with pytest.raises(UnknownDrafter, match="redraft init"):
        registry.drafter("chat")
    make_drafter(registry, "code")
    make_drafter(registry, "chat")
    with pytest.raises(UnknownDrafter, match="'chta'; there are chat, code"):
        registry.live("chta")


def test_an_unknown_version_is_answered_with_those_there_are(registry: Registry) -> None:
    make_drafter(registry)
    with pytest.raises(UnknownVersion, match="chat has no version 7; it has 1 to 1"):
        registry.version("chat", 7)


def test_the_only_drafter_of_a_target_need_not_be_named(registry: Registry) -> None:
    make_drafter(registry, "chat", "target-1")
    make_drafter(registry, "other", "target-2")
    assert registry.choose("", "target-1").name == "chat"
    with pytest.raises(UnknownDrafter, match="redraft init"):
        registry.choose("", "target-3")


def test_of_several_drafters_one_must_be_named(registry: Registry) -> None:
    make_drafter(registry, "chat")
    make_drafter(registry, "code")
    with pytest.raises(UnknownDrafter, match=r"\(chat, code\): set REDRAFT_DRAFTER"):
        registry.choose("", "target-1")
    assert registry.choose("code", "target-1").name == "code"


def test_a_drafter_of_another_target_is_refused(registry: Registry) -> None:
    make_drafter(registry, "chat", "target-1")
    with pytest.raises(WrongDrafter, match="made for another target"):
        registry.choose("chat", "target-2")


def test_a_retired_drafter_cannot_be_chosen_but_is_kept(registry: Registry) -> None:
    make_drafter(registry, "chat")
    make_drafter(registry, "code")
    registry.retire_drafter("chat", "me")
    assert registry.choose("", "target-1").name == "code"
    assert [d.name for d in registry.drafters()] == ["code"]
    assert [d.name for d in registry.drafters(include_retired=True)] == ["chat", "code"]
    with pytest.raises(UnknownDrafter, match="retired"):
        registry.choose("chat", "target-1")
    assert registry.live("chat").number == 1


def test_a_window_and_a_parent_make_one_version(registry: Registry, store: WeightsStore) -> None:
    first = make_drafter(registry)
    second = make_candidate(registry, store, first, "a")
    assert (second.number, second.parent) == (2, 1)
    assert second.window_id is not None
    again = registry.add_candidate(first, "cd" * 32, 7, second.window_id, make_training())
    assert again == second == registry.candidate_of(second.window_id, first.id)
    assert _training_runs(registry) == 1


def test_a_window_is_followed_to_its_newest_version_whatever_the_parent(
    registry: Registry, store: WeightsStore
) -> None:
    first = make_drafter(registry)
    second = make_candidate(registry, store, first, "a")
    assert second.window_id is not None
    third = registry.add_candidate(second, DIGEST, 100, second.window_id, make_training())
    assert registry.candidate_of(second.window_id) == third
    assert registry.candidate_of(second.window_id, first.id) == second
    assert registry.candidate_of(second.window_id + 1) is None


def test_versions_are_numbered_per_drafter(registry: Registry, store: WeightsStore) -> None:
    chat, code = make_drafter(registry, "chat"), make_drafter(registry, "code")
    numbers = [make_candidate(registry, store, parent, name).number for parent, name in [
        (chat, "a"), (code, "b"), (chat, "c")]]  # fmt: skip
    assert numbers == [2, 2, 3]


def test_the_run_that_made_a_version_is_kept(registry: Registry, store: WeightsStore) -> None:
    first = make_drafter(registry)
    second = make_candidate(registry, store, first, "a")
    assert registry.training(second) == make_training()
    assert registry.training(first) is None


def test_a_failed_run_makes_no_version_and_may_have_no_finite_loss(registry: Registry, store: WeightsStore) -> None:
    first = make_drafter(registry)
    window = Windows(registry.engine, store).keep("chat", (make_record("a"),), ())
    assert window is not None
    failure = make_training("failed", float("nan"), "the loss was not finite at step 3")
    registry.record_training_failure(first, window.id, failure)
    assert registry.candidate_of(window.id, first.id) is None
    assert _training_runs(registry) == 1


def test_a_version_carries_its_evaluation(registry: Registry, store: WeightsStore) -> None:
    first = make_drafter(registry)
    second = make_candidate(registry, store, first, "a")
    registry.record(second, make_evaluation(0.1), make_decision(True, "gain 0.1"))
    registry.record(second, make_evaluation(0.9), make_decision(False, "a second answer"))
    summary = registry.versions("chat")[1]
    assert summary.evaluation == make_evaluation(0.1)
    assert (summary.state, summary.reason) == ("candidate", "gain 0.1")


def test_an_evaluation_without_positions_is_kept(registry: Registry, store: WeightsStore) -> None:
    second = make_candidate(registry, store, make_drafter(registry), "a")
    registry.record(second, make_evaluation(float("nan")), make_decision(False))
    kept = registry.versions("chat")[1].evaluation
    assert kept is not None
    assert kept.overall.gain != kept.overall.gain  # not a number, as it was given


def test_states_follow_what_happened(registry: Registry, store: WeightsStore) -> None:
    first = make_drafter(registry)
    candidates = [make_candidate(registry, store, first, name) for name in "abcd"]
    refused, kept, bad, _ = candidates
    registry.record(refused, make_evaluation(-0.1), make_decision(False, "not above the margin"))
    registry.record(kept, make_evaluation(), make_decision(True, "better"))
    registry.promote(kept, first, "trainer", "better")
    registry.promote(bad, kept, "trainer", "seemed better")
    registry.rollback("chat", None, "me", "complaints")
    assert [(s.version.number, s.state, s.reason) for s in registry.versions("chat")] == [
        (1, "retired", "better"),
        (2, "refused", "not above the margin"),
        (3, "live", "better"),
        (4, "rolled_back", "complaints"),
        (5, "candidate", ""),
    ]


def test_a_version_that_was_taken_back_can_go_live_again(registry: Registry, store: WeightsStore) -> None:
    first = make_drafter(registry)
    second = make_candidate(registry, store, first, "a")
    registry.promote(second, first, "trainer", "better")
    registry.rollback("chat", None, "me", "a try")
    registry.promote(second, first, "me", "and forward again")
    assert [s.state for s in registry.versions("chat")] == ["retired", "live"]


def test_a_version_of_another_drafter_cannot_go_live(registry: Registry, store: WeightsStore) -> None:
    chat, code = make_drafter(registry, "chat"), make_drafter(registry, "code", "target-2")
    stranger = make_candidate(registry, store, code, "a")
    with pytest.raises(WrongDrafter, match="code cannot replace one of chat"):
        registry.promote(stranger, chat, "me", "")


def test_versions_are_plain_frozen_records(registry: Registry) -> None:
    first = make_drafter(registry)
    assert isinstance(first, Version)
    assert first.weights_sha256 == DIGEST
    with pytest.raises(AttributeError):
        first.number = 2  # type: ignore[misc]


def _training_runs(registry: Registry) -> int:
    with reading(registry.engine) as session:
        return session.scalars(select(func.count()).select_from(TrainingRow)).one()
