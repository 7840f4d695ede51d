"""Feedback on against off, on a real Valkey."""

import json

import pytest

from adapter.drafters.causal_lm import CausalLM
from adapter.policy import Policy
from adapter.target import Target
from benchmarks.arms import EngineArm, Play
from benchmarks.feedback import NAME, FeedbackSettings, Recording, measure
from benchmarks.run import RunFailed
from benchmarks.workload import Workload
from service.engine.engine import EngineConfig
from storage.redis_clients import consume
from storage.stream import ADAPT, FeedbackStream
from tests.valkey_fixture import ValkeyServer

SETTINGS = FeedbackSettings(batches=(1, 2), requests=4, max_tokens=8, repeats=3, draft_length=2)


def test_both_arms_are_measured_in_turn_and_only_one_writes(
    target: Target, drafter: CausalLM, prompts: Workload, valkey: ValkeyServer
) -> None:
    report = measure(target, drafter, EngineConfig(), prompts, SETTINGS, valkey.url)
    for row in report.rows:
        assert len(row.on) == len(row.off) == 3
        assert min(*row.on, *row.off) > 0
        assert row.ratio == pytest.approx(sorted(row.on)[1] / sorted(row.off)[1])
        neighbours = sorted(on / off for on, off in zip(row.on, row.off, strict=True))
        assert row.paired_ratio == pytest.approx(neighbours[1])
    assert [row["batch"] for row in json.loads(json.dumps(report.as_json()))["rows"]] == [1, 2]
    with valkey.client() as client:
        assert sum(client.xlen(key) for key in client.keys("*") if client.type(key) == b"stream") == 2 * 4 * 4


def test_what_is_written_has_teacher_rows(
    target: Target, drafter: CausalLM, prompts: Workload, valkey: ValkeyServer
) -> None:
    recording = Recording(target, valkey.url)
    arm = EngineArm("feedback", target, EngineConfig(draft_length=2, slots=1, context=256), drafter, train=True,
                    on_finished=recording.finished)  # fmt: skip
    recording.on = True
    arm.run(Play("tiny", prompts.prompts[:1], Policy(temperature=0.0), 16))
    recording.wait()
    arm.close()
    recording.close()
    with consume(valkey.url) as client:
        ((_, data),) = FeedbackStream(client, NAME).read(ADAPT, "test", 10).entries
    from storage.records import decode

    record = decode(data)
    assert record.teacher.positions
    assert record.rounds


def test_feedback_that_cannot_be_written_is_no_measurement(
    target: Target, drafter: CausalLM, prompts: Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.feedback.WRITE_SECONDS", 0.3)
    with pytest.raises(RunFailed, match="feedback was not written"):
        measure(target, drafter, EngineConfig(), prompts, SETTINGS, "unix:///nobody/listens.sock")
