"""The table of kinds on a tiny target: every kind, workload and shape, with figures that agree with one another."""

import json

import pytest
import torch

from adapter.distil import DistilConfig
from adapter.drafters.kinds import KINDS, Sizes, first_version
from adapter.drafters.learnt import DrafterRefused, LearntDrafter
from adapter.drafters.ngram import Ngram
from adapter.drafters.protocol import Shape
from adapter.drafters.recent import Recent
from adapter.drafters.shared import Shared
from adapter.rescore import hidden_states
from adapter.target import Target
from benchmarks.answers import Segment, segment
from benchmarks.drafters import DraftersReport, DraftersSettings, NothingMeasured, Starts, Subject, measure
from benchmarks.drafters_page import page, told
from benchmarks.drafters_rows import DrafterRow, PlainRow, best_of, meanings
from benchmarks.drafters_students import looking_up, replayed, taught
from benchmarks.experiment import Traffic
from benchmarks.workload import workload
from service.engine.engine import EngineConfig
from service.engine.governor import GovernorConfig
from tests.benchmarks.test_adapt import WORKLOADS
from tests.benchmarks.test_decode import Elements

TRAFFIC = Traffic(requests=24, held_out=4, max_tokens=12, seed=0)
LEARNING = KINDS.keys()
SETTINGS = DraftersSettings(
    TRAFFIC, 4, (*LEARNING, "ngram"), draft_length=3, nodes=8, batch=1, repeats=1, together=False, warm_start=False
)
QUICK = DistilConfig(epochs=24, learning_rate=1e-2, batch_tokens=512)


def subject(target: Target) -> Subject:
    return Subject(target, EngineConfig(ngram_tokens=1024), GovernorConfig(), QUICK)


def starts(target: Target) -> Starts:
    def start(kind: str) -> LearntDrafter:
        shared = Shared(target.embedding, target.files)
        return first_version(kind, target.model, shared, torch.arange(250), Sizes(1, SETTINGS.draft_length))

    return {kind: lambda kind=kind: start(kind) for kind in LEARNING}  # type: ignore[misc]


@pytest.fixture(scope="module")
def segments(target: Target, tmp_path_factory: pytest.TempPathFactory) -> list[Segment]:
    cache = tmp_path_factory.mktemp("cache")
    found = [workload(name, texts, target, 28, 200) for name, texts in WORKLOADS.items()]
    return [segment(target, each, 4, TRAFFIC.max_tokens, 0, cache, lambda line: None) for each in found]


@pytest.fixture(scope="module")
def said() -> list[str]:
    return []


@pytest.fixture(scope="module")
def report(target: Target, segments: list[Segment], said: list[str]) -> DraftersReport:
    return measure(subject(target), segments, starts(target), SETTINGS, said.append)


def rows(report: DraftersReport, **wanted: str) -> list[DrafterRow]:
    return [row for row in report.rows if all(getattr(row, name) == value for name, value in wanted.items())]


def test_there_is_a_row_for_every_kind_workload_and_shape(report: DraftersReport) -> None:
    shapes = ("chain", "tree", "governed", "combined")
    expected = {(kind, name, shape) for kind in SETTINGS.kinds for name in WORKLOADS for shape in shapes}
    assert {(row.kind, row.workload, row.shape) for row in report.rows} == expected
    assert len(report.rows) == len(expected)
    assert [row.workload for row in report.plain] == list(WORKLOADS)
    assert report.refused == ()


def test_every_output_is_plain_decodings_own(report: DraftersReport) -> None:
    assert {(row.identical, row.near_ties, row.different) for row in report.rows} == {(4, 0, 0)}


def test_every_kind_learns_and_ngram_has_nothing_to_learn(report: DraftersReport) -> None:
    for kind in LEARNING:
        found = rows(report, kind=kind, shape="chain")
        before = sum(row.acceptance_probability_before or 0.0 for row in found)
        assert sum(row.acceptance_probability for row in found) > before, kind
        assert all(row.parameters > 0 and row.training_seconds > 0 and row.training_records == 24 for row in found)
    for row in rows(report, kind="ngram"):
        assert (row.parameters, row.position_bytes, row.reading_seconds) == (0, 0, 0.0)
        assert row.acceptance_probability_before is None
        assert row.acceptance_length_before is None


def test_only_kinds_that_need_hidden_states_have_records_read_again(report: DraftersReport) -> None:
    reading = {row.kind: row.reading_seconds > 0 for row in report.rows}
    assert reading["causal_lm"] is False
    assert reading["medusa"] is reading["mtp"] is reading["eagle"] is True
    for row in rows(report, kind="eagle"):
        both = row.training_seconds + row.reading_seconds
        assert row.training_seconds_per_thousand == pytest.approx(1000 * both / row.training_records)


def test_the_figures_of_a_row_agree_with_one_another(report: DraftersReport) -> None:
    for row in report.rows:
        plain = next(each for each in report.plain if each.workload == row.workload)
        assert row.speed_up == pytest.approx(row.accepted_progress / plain.accepted_progress)
        assert row.round_cost == pytest.approx(row.round_ms / plain.round_ms)
        deepest = 14 if row.shape == "combined" else row.k
        assert 1.0 <= row.tokens_per_round <= deepest + 1
        assert 0.0 <= row.acceptance_probability <= 1.0
        if row.rounds:
            assert row.acceptance_length is not None
            assert row.acceptance_by_position is not None
            assert row.tokens_per_round <= row.acceptance_length + 1e-9
            assert sum(row.acceptance_by_position) == pytest.approx(row.acceptance_length - 1)
            assert len(row.acceptance_by_position) <= deepest
        assert (row.draft_cost is None) is (row.shape in ("governed", "combined") or not row.rounds)


def test_the_engine_plays_the_rounds_that_replay_foretells(
    report: DraftersReport, target: Target, segments: list[Segment]
) -> None:
    """But for the last round of a text, in which the engine proposes one token less."""
    shared, make = Shared(target.embedding, target.files), starts(target)["causal_lm"]
    for part in segments:
        student = taught(make, target, shared, part.stream, QUICK, Shape.chain(3))
        (row,) = rows(report, kind="causal_lm", shape="chain", workload=part.workload)
        foretold = replayed(student.drafter, target, part.held_out, 3)
        assert foretold.probability == row.acceptance_probability
        assert foretold.length == pytest.approx(row.acceptance_length, abs=0.15)
        assert replayed(make(), target, part.held_out, 3).length == row.acceptance_length_before


def test_memory_is_told_apart_by_kind(report: DraftersReport) -> None:
    sizes = {row.kind: (row.memory_mb, row.position_bytes) for row in report.rows}
    assert all(memory > 0 for memory, _ in sizes.values())
    assert sizes["medusa"][1] == 0
    assert sizes["eagle"][1] == sizes["mtp"][1] > 0


def test_the_best_kind_of_a_workload_is_the_one_with_most_progress(report: DraftersReport) -> None:
    assert [best.workload for best in report.best] == list(WORKLOADS)
    for best in report.best:
        found = rows(report, workload=best.workload)
        assert best.speed_up == max(row.speed_up for row in found)
        assert best.ngram_speed_up == max(row.speed_up for row in found if row.kind == "ngram")
        assert best.kind in told(best)
    assert best_of(rows(report, kind="medusa"))[0].ngram_speed_up is None


def test_the_report_is_json_with_all_that_its_words_mean(report: DraftersReport) -> None:
    read = json.loads(json.dumps(report.as_json(), allow_nan=False))
    assert {"settings", "workloads", "learning", "machine", "rows", "plain", "best", "refused", "meanings"} == set(read)
    plainly_named = {"workload", "k", "nodes", "batch", "requests", "repeats"}
    assert set(read["rows"][0]) == set(read["meanings"]) | plainly_named
    assert set(meanings()) <= set(DrafterRow.__dataclass_fields__)
    assert set(read["plain"][0]) == set(PlainRow.__dataclass_fields__)


def test_the_page_is_one_file_with_plots_and_both_tables(report: DraftersReport) -> None:
    text = page(report)
    elements = Elements()
    elements.feed(text)
    assert elements.count["svg"] == 4
    assert elements.loaded == []
    assert elements.count["tr"] == 1 + len(report.rows) + 1 + len(report.plain)


@pytest.mark.usefixtures("report")
def test_it_says_how_far_it_is(said: list[str]) -> None:
    assert any(line.startswith("sql: medusa learned from 24 records") for line in said)
    assert any("sql is done; about" in line for line in said)
    assert said[-1] == "code is done"


def test_together_a_kind_has_one_student_for_all_workloads(target: Target, segments: list[Segment]) -> None:
    settings = DraftersSettings(TRAFFIC, 4, ("medusa", "ngram"), 2, 0, 2, 1, together=True, warm_start=False)
    found = measure(subject(target), segments, starts(target), settings)
    assert {(row.kind, row.training_records) for row in found.rows} == {("medusa", 48), ("ngram", 48)}
    assert {row.shape for row in found.rows} == {"chain", "governed", "combined"}
    assert {row.batch for row in found.rows} == {2}


def test_a_kind_that_is_refused_is_left_out_with_the_reason(target: Target, segments: list[Segment]) -> None:
    def refuse() -> LearntDrafter:
        raise DrafterRefused("not for this target")

    settings = DraftersSettings(TRAFFIC, 4, ("eagle", "ngram"), 2, 0, 1, 1, together=True, warm_start=False)
    found = measure(subject(target), segments[:1], {"eagle": refuse}, settings)
    assert {row.kind for row in found.rows} == {"ngram"}
    assert [(refused.kind, refused.reason) for refused in found.refused] == [("eagle", "not for this target")]
    assert "eagle is left out: not for this target" in page(found)
    only = DraftersSettings(TRAFFIC, 4, ("eagle",), 2, 0, 1, 1, together=True, warm_start=False)
    with pytest.raises(NothingMeasured, match="eagle: not for this target"):
        measure(subject(target), segments[:1], {"eagle": refuse}, only)


def test_ngrams_look_in_the_records_outputs_and_nowhere_else(target: Target, segments: list[Segment]) -> None:
    """An answer that was taken in is foretold; one that was not is only where its text repeats itself."""
    part = segments[0]
    student = looking_up(target, part.stream, 1024)
    bare = Ngram(target.vocab_size, target.device, Recent(16, target.vocab_size))
    seen, alone = (replayed(drafter, target, part.stream, 3) for drafter in (student.drafter, bare))
    assert seen.probability > max(0.5, alone.probability)
    assert seen.length is None
    assert student.training.records == len(part.stream)


def test_hidden_states_are_read_of_the_whole_text(target: Target, segments: list[Segment]) -> None:
    medusa = starts(target)["medusa"]()
    hidden = hidden_states(target, segments[0].held_out, medusa.taps)
    for answer in segments[0].held_out:
        if len(answer.output) > 1:
            assert len(hidden[answer.record_id]) == len(answer.prompt) + len(answer.output)
    assert hidden_states(target, segments[0].held_out, starts(target)["causal_lm"]().taps) == {}


def test_a_second_run_learns_the_same(report: DraftersReport, target: Target, segments: list[Segment]) -> None:
    settings = DraftersSettings(TRAFFIC, 4, ("eagle",), 3, 0, 1, 1, together=False, warm_start=False)
    again = measure(subject(target), segments[:1], starts(target), settings)
    (ours,) = rows(report, kind="eagle", workload="sql", shape="chain")
    theirs = next(row for row in again.rows if row.shape == "chain")
    assert theirs.acceptance_probability == ours.acceptance_probability
    assert theirs.acceptance_by_position == ours.acceptance_by_position
