"""The whole table on a tiny target: every arm, every figure, and figures that agree with one another."""

import json
from collections.abc import Iterator
from html.parser import HTMLParser

import pytest
import torch

from adapter.drafters.causal_lm import CausalLM
from adapter.target import Target
from benchmarks.decode import DecodeSettings, Report, measure
from benchmarks.figures import Row
from benchmarks.page import page
from benchmarks.workload import NoPrompts, workload
from service.engine.engine import EngineConfig
from service.engine.governor import GovernorConfig
from tests.benchmarks.conftest import TEXTS

SETTINGS = DecodeSettings((1, 3), (0.0, 0.8), (1, 2), requests=4, max_tokens=12, repeats=2, drafter="tiny", version=1)


@pytest.fixture(scope="module")
def report(target: Target) -> Report:
    drafter = CausalLM.from_target(target.model, 2, torch.arange(250))
    return measure(
        target, drafter, EngineConfig(), GovernorConfig(), [workload("a<b>", TEXTS, target, 4, 200)], SETTINGS
    )


def rows(report: Report, *arms: str) -> Iterator[Row]:
    return (row for row in report.rows if row.arm in arms)


def test_every_arm_has_a_row_for_every_setting(report: Report) -> None:
    everywhere = ("plain", "speculative", "governed", "hf_plain")
    expected = {(arm, k, t, b) for arm in everywhere for k in (1, 3) for t in (0.0, 0.8) for b in (1, 2)}
    expected |= {("hf_assisted", k, t, 1) for k in (1, 3) for t in (0.0, 0.8)}
    found = [(row.arm, row.k, row.temperature, row.batch) for row in report.rows]
    assert sorted(found) == sorted(expected)


def test_the_acceptance_figures_agree_with_one_another(report: Report) -> None:
    for row in rows(report, "speculative", "hf_assisted"):
        assert row.rounds > 0
        assert row.acceptance_by_position is not None
        assert row.rejection_positions is not None
        assert row.acceptance_length is not None
        assert 0 <= row.accepted <= row.proposed <= row.k * row.rounds
        assert row.acceptance_rate == row.accepted / row.proposed
        assert sum(row.acceptance_by_position) == pytest.approx(row.acceptance_length - 1)
        assert len(row.rejection_positions) == len(row.acceptance_by_position) == row.k
        assert sum(row.rejection_positions) <= row.rounds
        assert 0.0 <= (row.acceptance_probability or -1.0) <= 1.0


def test_costs_speeds_and_latencies_are_measured_in_every_arm(report: Report) -> None:
    for row in report.rows:
        assert row.tokens_per_second > 0
        assert row.accepted_progress > 0
        assert row.round_ms > 0
        assert 0 < row.latency_ms <= row.latency_p95_ms
        assert row.peak_memory_mb > 50
    for row in rows(report, "speculative", "hf_assisted"):
        assert 0 < (row.draft_ms or 0) < row.round_ms * 3
        assert (row.ratio_to_ideal or 0) == pytest.approx(row.speed_up / (row.ideal_speed_up or 0))


def test_greedy_outputs_of_all_our_arms_are_plain_decodings_own(report: Report) -> None:
    greedy = [row for row in report.rows if row.temperature == 0.0]
    assert {(row.identical, row.near_ties, row.different) for row in greedy} == {(8, 0, 0)}
    assert {row.identical for row in report.rows if row.temperature > 0} == {None}


def test_assisted_generation_has_our_drafter_and_accepts_what_our_engine_accepts(report: Report) -> None:
    """Greedy rounds of the same weights and k accept the same tokens, but for the first round, which theirs has too."""
    theirs = {row.k: row for row in rows(report, "hf_assisted") if row.temperature == 0.0}
    for row in rows(report, "speculative"):
        if (row.temperature, row.batch) == (0.0, 1):
            assert theirs[row.k].acceptance_length == pytest.approx(row.acceptance_length, abs=0.2)


def test_the_report_is_json_with_the_machine_and_what_words_mean(report: Report) -> None:
    read = json.loads(json.dumps(report.as_json(), allow_nan=False))
    assert read["settings"]["ks"] == [1, 3]
    assert read["machine"]["dtype"] == "float32"
    assert read["machine"]["cores"] >= 1
    assert {"arm", "workload", "k", "temperature", "batch", "accepted_progress"} <= read["rows"][0].keys()
    assert "accepted / proposed" in read["meanings"]["acceptance_rate"]


class Elements(HTMLParser):
    """Counts a page's elements and what it would load from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.count: dict[str, int] = {}
        self.loaded: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.count[tag] = self.count.get(tag, 0) + 1
        if tag in ("script", "link", "img"):
            self.loaded.append(tag)


def test_the_page_is_one_file_with_plots_and_the_whole_table(report: Report) -> None:
    text = page(report)
    elements = Elements()
    elements.feed(text)
    assert elements.count["svg"] == 4
    assert elements.loaded == []
    shown = 2 * 2 * (2 + 2 * 2) + 2 * 2  # batches, temperatures: plain, hf_plain, two arms by k; hf_assisted
    assert elements.count["tr"] == 1 + shown
    assert "a&lt;b&gt;" in text
    assert "a<b>" not in text


def test_prompts_are_spread_over_the_file_and_never_sent_twice(target: Target) -> None:
    found = workload("tiny", TEXTS, target, 4, 200)
    assert len(set(found.prompts)) == 4
    assert found.prompts[1] == workload("tiny", TEXTS[2:3], target, 1, 200).prompts[0]


def test_a_workload_with_too_few_short_prompts_is_refused(target: Target) -> None:
    with pytest.raises(NoPrompts, match="tiny has 8 prompts of at most 200 tokens, and 9 requests"):
        workload("tiny", TEXTS, target, 9, 200)
    with pytest.raises(NoPrompts, match="0 prompts of at most 3 tokens"):
        workload("tiny", TEXTS, target, 1, 3)
