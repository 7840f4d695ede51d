"""The demo's parts that need no model: its prompts, its report, and what it calls a shortfall."""

import json
from pathlib import Path

import pytest

from cli.demo.comparison import Arm
from cli.demo.finale import Finale
from cli.demo.progress import Progress
from cli.demo.prompts import docstrings, human_eval, workloads
from cli.demo.report import report_of, write
from cli.demo.story import LEARNING_SECONDS, NOTICE_SECONDS, until_quiet
from cli.demo.traffic import Answer, Failure
from cli.operate import Moved
from storage.registry import Event, VersionSummary
from tests.cli.conftest import Run


def test_the_prompts_are_real_and_many() -> None:
    assert len(human_eval()) == 164
    assert len(docstrings()) > 500


def test_unseen_prompts_are_never_sent_as_traffic() -> None:
    for part in workloads(requests=400, unseen=16):
        assert len(part.traffic) == 200
        assert len(part.unseen) == 8
        assert not set(part.unseen) & set(part.traffic)


def test_the_prompts_come_in_the_same_order_every_time() -> None:
    assert workloads(20, 4) == workloads(20, 4)


class NoRegistry:
    """A registry without versions."""

    def versions(self, drafter: str) -> list[VersionSummary]:
        return []


def arm(
    name: str, probability: float | None, identical: int = 8, near_ties: int = 0, length: float | None = 1.4
) -> Arm:
    return Arm(name, None, 4, probability, 0.1, length, 20.0, identical, near_ties, 8)


def finale(first: float, last: Arm) -> Finale:
    """A demo's end with that acceptance probability of the first version, and that arm of the last."""
    arms = (arm("plain", None), arm("first", first), last, arm("governed", 0.3))
    moved = Moved("demo", 1, 4, ("server",), (), 120.0)
    events = tuple(Event("promote", n, n + 1, n + 1, "worker", "", None) for n in (1, 2))  # type: ignore[arg-type]
    return Finale(arms, moved, moved, events)


@pytest.fixture
def progress() -> Progress:
    progress = Progress(NoRegistry(), "demo", 3)  # type: ignore[arg-type]
    for version, accepted in ((1, 1), (2, 30)):
        progress.add(Answer("humaneval", [1], [2, 3], 1.0, version, 100, accepted, 25))
    return progress


def test_a_demo_in_which_the_drafter_did_not_learn_says_so(progress: Progress) -> None:
    report = report_of("causal_lm", progress, finale(0.3, arm("last", 0.3)), 1.0)
    assert "the last version's acceptance probability is not above the first's" in report.shortfalls


def test_a_demo_in_which_the_acceptance_length_did_not_rise_says_so(progress: Progress) -> None:
    told = "the last version's acceptance length is not above the first's"
    assert told in report_of("medusa", progress, finale(0.1, arm("last", 0.3)), 1.0).shortfalls
    risen = report_of("medusa", progress, finale(0.1, arm("last", 0.3, length=1.9)), 1.0)
    assert told not in risen.shortfalls
    assert risen.kind == "medusa"


def test_an_output_that_departs_without_a_near_tie_is_a_shortfall(progress: Progress) -> None:
    report = report_of("causal_lm", progress, finale(0.1, arm("last", 0.3, 6, 1)), 1.0)
    assert "1 outputs of arm last differ from plain decoding" in report.shortfalls


def test_a_failed_request_is_a_shortfall(progress: Progress) -> None:
    progress.add(Failure("humaneval", "connection refused"))
    report = report_of("causal_lm", progress, finale(0.1, arm("last", 0.3)), 1.0)
    assert report.failed_requests == 1
    assert any("connection refused" in shortfall for shortfall in report.shortfalls)


def test_the_report_and_the_plot_are_written(progress: Progress, tmp_path: Path) -> None:
    report = report_of("causal_lm", progress, finale(0.1, arm("last", 0.3)), 1.0)
    write(report, progress.answers, tmp_path)
    written = json.loads((tmp_path / "report.json").read_text())
    assert [a["arm"] for a in written["comparison"]] == ["plain", "first", "last", "governed"]
    assert (written["promoted"], written["rollback_ms"]) == (2, 120.0)
    assert (tmp_path / "acceptance.png").read_bytes().startswith(b"\x89PNG")


class Clock:
    """Time that passes only in sleep."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_the_traffic_is_over_only_when_no_further_update_was_started_for_a_while() -> None:
    clock = Clock()
    until_quiet(lambda: not 5 <= clock.now <= 20, clock, clock.sleep)
    assert clock.now == 20 + NOTICE_SECONDS
    busy = Clock()
    until_quiet(lambda: False, busy, busy.sleep)
    assert busy.now == LEARNING_SECONDS


def test_a_kind_that_has_nothing_to_learn_is_refused_with_what_to_do_instead(redraft: Run) -> None:
    result = redraft("demo", "--kind", "ngram")
    assert result.exit_code == 1
    assert "an ngram drafter has no weights" in result.stderr
    assert "REDRAFT_FALLBACK=ngram" in result.stderr


def test_a_kind_that_is_none_is_refused(redraft: Run) -> None:
    result = redraft("demo", "--kind", "fast")
    assert result.exit_code == 1
    assert "there is no kind 'fast': use causal_lm, medusa" in result.stderr
