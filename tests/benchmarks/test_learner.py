"""The learning side of an arm: updates as soon as they are due, and no more on disk than is needed."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from adapter.drift import DriftConfig
from adapter.target import Target
from benchmarks import learning
from benchmarks.experiment import Experiment, Traffic
from benchmarks.learner import Learner
from benchmarks.traffic import Drafting, play
from storage.records import FeedbackRecord
from tests.benchmarks.test_adapt import OURS, prepared
from tests.valkey_fixture import ValkeyServer

TRAFFIC = Traffic(requests=28, held_out=1, max_tokens=12, seed=None)
Made = Callable[[str], Learner]


@pytest.fixture
def experiment(target: Target, tmp_path: Path) -> Experiment:
    return prepared(target, tmp_path / "cache", tmp_path / "run", TRAFFIC)


@pytest.fixture
def made(experiment: Experiment, valkey: ValkeyServer) -> Iterator[Made]:
    """Learners of an arm, closed after the test."""
    learners: list[Learner] = []

    def make(arm: str) -> Learner:
        config = learning.adapting(arm, OURS.adapt)
        learners.append(Learner(arm, experiment, config, DriftConfig(), valkey.url))
        return learners[-1]

    yield make
    for learner in learners:
        learner.close()


def served(learner: Learner, experiment: Experiment, start: int, end: int) -> list[FeedbackRecord]:
    number, drafter = learner.live()
    drafting = Drafting("arm", number, drafter, 2)
    return [play(drafting, answer)[0] for answer in experiment.segments[0].stream[start:end]]


def test_every_window_that_is_full_is_learnt_from_at_once(experiment: Experiment, made: Made) -> None:
    learner = made("osd")
    assert learner.take_in(served(learner, experiment, 0, 7)) == []
    updates = learner.take_in(served(learner, experiment, 7, 24))
    assert [(update.cause, update.records, update.outcome) for update in updates] == [("size", 8, "promoted")] * 3
    assert learner.live()[0] == 4


def test_weights_that_are_neither_live_nor_the_first_are_deleted(experiment: Experiment, made: Made) -> None:
    learner = made("osd")
    learner.take_in(served(learner, experiment, 0, 24))
    files = [path for path in (experiment.folder / "osd" / "weights" / "sha256").glob("*/*") if path.is_file()]
    windows = 3
    assert len(files) == windows + len(("version 1", "version 4", "the moments of version 4"))


def test_the_frozen_arm_takes_records_and_does_nothing(experiment: Experiment, made: Made) -> None:
    learner = made("frozen")
    assert learner.take_in(served(learner, experiment, 0, 24)) == []
    assert learner.live()[0] == 1


def test_osd_as_published_has_no_replay_and_takes_one_step_of_a_constant_rate(
    experiment: Experiment, made: Made
) -> None:
    config = learning.adapting(learning.OSD, OURS.adapt)
    assert (config.distil.positions, config.distil.loss, config.distil.replay_records) == ("rejected", "forward_kl", 0)
    learner = made("osd")
    learner.take_in(served(learner, experiment, 0, 8))
    run = learner.training(2)
    assert run is not None
    assert (run.steps, run.records, run.replayed) == (1, 8, 0)


def test_osd_tuned_differs_in_positions_replay_and_gate_and_not_in_its_steps() -> None:
    tuned, ours = learning.adapting(learning.OSD_TUNED, OURS.adapt), learning.adapting(learning.REDRAFT, OURS.adapt)
    assert tuned.distil.learning_rate == ours.distil.learning_rate
    assert tuned.trigger.window_records == ours.trigger.window_records
    assert (tuned.distil.positions, tuned.distil.replay_records, tuned.trigger.holdout_share) == ("rejected", 0, 0.0)
    assert tuned.gate == learning.ALWAYS_PROMOTE
