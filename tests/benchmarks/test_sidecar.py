"""The measurement of what a sidecar costs, on engines that take as long as a test says."""

import json

import pytest

from benchmarks.sidecar import DIRECT, BadAnswer, SidecarSettings, measure
from tests.service.hosts.sidecar.rig import Script, served

STREAM = [(b"content-type", b"text/event-stream")]
SETTINGS = SidecarSettings("m", ("a", "b", "c", "d"), max_tokens=8, batch=2, repeats=2)


def _engine(pause: float) -> Script:
    return Script(headers=STREAM, pieces=[b"data: {}\n\n", b"data: [DONE]\n\n"], pause=pause)


def test_the_slower_way_shows_its_overhead() -> None:
    fast, slow = _engine(0.1), _engine(0.2)
    with served(fast) as direct, served(slow) as other:
        report = measure(SETTINGS, {DIRECT: direct, "sidecar": other})
    assert 0.3 < report.overhead("sidecar") < 0.7
    assert report.overhead(DIRECT) == 0
    assert all(len(arm.tokens_per_second) == 2 for arm in report.arms)
    asked = json.loads(fast.asked[0]["body"])
    assert (asked["stream"], asked["ignore_eos"], asked["max_tokens"]) == (True, True, 8)
    assert len(fast.asked) == len(slow.asked) == 12


def test_a_stream_that_breaks_off_is_no_measurement() -> None:
    engine = Script(headers=STREAM, pieces=[b"data: {}\n\n"])
    with served(engine) as direct, pytest.raises(BadAnswer, match="broke off"):
        measure(SETTINGS, {DIRECT: direct})
