"""Records from another process: each rule, and the reason that a refusal gives."""

from typing import Any

import msgspec
import numpy as np
import pytest

from storage.records import FeedbackRecord, RecordRefused, Round, TeacherRows, int32
from storage.validation import validate, validate_figures
from tests.storage.rows import make_record

VOCABULARY = 100
NAN, INF = float("nan"), float("inf")


def rows(
    positions: tuple[int, ...] = (2, 5),
    ids: tuple[tuple[int, ...], ...] = ((2, 50, 51), (5, 50, 51)),
    log_probs: tuple[tuple[float, ...], ...] = ((-0.5, -1.5, -3.0), (-0.5, -1.5, -3.0)),
    tail: tuple[float, ...] | None = None,
    refusals: tuple[float, ...] = (),
) -> TeacherRows:
    """Two rows of an output 0, 1, 2, ...: at positions 2 and 5, likeliest first the token emitted there."""
    with np.errstate(divide="ignore", invalid="ignore"):
        rest = np.log(np.maximum(0.0, 1 - np.exp(np.array(log_probs)).sum(axis=1)))
    return TeacherRows(
        top_k=len(ids[0]),
        positions=int32(list(positions)),
        ids=np.array(ids, dtype="<i4").tobytes(),
        log_probs=np.array(log_probs, dtype="<f2").tobytes(),
        tail_log_mass=np.array(rest if tail is None else tail, dtype="<f4").tobytes(),
        refusals=np.array(refusals, dtype="<f4").tobytes(),
    )


def record(**changes: Any) -> FeedbackRecord:
    sound = make_record("a", (Round(1, 1, 4, 1, 9, 0.5, 1.0, 2.0), Round(3, 1, 4, 4, -1, 0.0, 1.0, 2.0)))
    return msgspec.structs.replace(sound, teacher=rows(), **changes)


def changed(**changes: Any) -> tuple[Round, ...]:
    return (msgspec.structs.replace(record().rounds[0], **changes), record().rounds[1])


def test_a_sound_record_passes() -> None:
    validate(record(), VOCABULARY)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"prompt_ids": int32([1, 100])}, "prompt ids outside the vocabulary of 100"),
        ({"output_ids": int32([0, -1, 2, 3, 4, 5, 6, 7])}, "output ids outside the vocabulary"),
        ({"prompt_ids": b""}, "empty prompt"),
        ({"output_ids": b"12345"}, "output ids are not whole int32 values"),
        ({"rounds": changed(rejected_token=100)}, "rejected ids outside the vocabulary"),
        ({"rounds": changed(accepted=5)}, "round at 1: 5 of 4 accepted"),
        ({"rounds": changed(proposed=2**31)}, "round at 1: 1 of 2147483648 accepted, output of 8"),
        ({"rounds": changed(version=2**40)}, "round at 1: version"),
        ({"rounds": changed(rejected_q=NAN)}, "with q nan"),
        ({"rounds": changed(draft_ms=NAN)}, "times of a round must be finite"),
        ({"rounds": changed(verify_ms=-1.0)}, "times of a round must be finite and not negative"),
        ({"total_ms": INF}, "times and memory must be finite"),
        ({"temperature": NAN}, "temperature must be finite"),
        ({"finished_at": NAN}, "finished at nan"),
        ({"finished_at": 1e18}, "no time between 1970 and 2100"),
        ({"workload": "a\x00b"}, "workload is not 1 to 64 printable characters"),
        ({"workload": "w" * 65}, "workload is not 1 to 64 printable characters"),
        ({"tenant": ""}, "tenant is not 1 to 64 printable characters"),
        ({"record_id": "r" * 257}, "record_id is not 1 to 256 printable characters"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_breaks_a_rule_is_refused_with_the_reason(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(RecordRefused, match=reason):
        validate(record(**changes), VOCABULARY)


@pytest.mark.parametrize(
    ("teacher", "reason"),
    [
        (rows(positions=(2, 8)), "positions outside the output"),
        (rows(positions=(5, 2)), "out of order"),
        (rows(ids=((2, 50, 100), (5, 50, 51))), "teacher ids outside the vocabulary of 100"),
        (rows(ids=((2, 50, 50), (5, 50, 51))), "names an id twice"),
        (rows(log_probs=((NAN,) * 3, (-0.5, -1.5, -3.0)), tail=(-1.0, -1.0)), "must be numbers of at most 0"),
        (rows(tail=(NAN, -1.0)), "must be numbers of at most 0"),
        (rows(log_probs=((0.5, -1.5, -3.0),) * 2, tail=(-1.0, -1.0)), "must be numbers of at most 0"),
        (rows(log_probs=((0.0, 0.0, 0.0),) * 2, tail=(-INF, -INF)), "hold a mass of 3.000 to 3.000, not 1"),
        (rows(log_probs=((0.0, 0.0, 0.0),) * 2, tail=(0.0, 0.0)), "hold a mass of 4.000 to 4.000, not 1"),
        (rows(log_probs=((-1.5, -0.5, -3.0),) * 2), "not in the order of falling probability"),
        (rows(log_probs=((-INF, -INF, -INF),) * 2, tail=(0.0, 0.0)), "more mass outside its top K than ids"),
        (TeacherRows(3, int32([2]), b"1234", b"", b""), "unequal lengths"),
        (rows(refusals=(0.5,)), "unequal lengths"),
        (msgspec.structs.replace(rows(), refusals=b"12345"), "unequal lengths"),
        (rows(refusals=(0.5, -0.1)), "between 0 and 1"),
        (rows(refusals=(1.5, 0.0)), "between 0 and 1"),
        (rows(refusals=(NAN, 0.0)), "between 0 and 1"),
        (TeacherRows(0, int32([2]), b"", b"", b""), "without a top-K"),
        (TeacherRows(-1, b"", b"", b"", b""), "unequal lengths"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_degenerate_teacher_rows_are_refused_with_the_reason(teacher: TeacherRows, reason: str) -> None:
    with pytest.raises(RecordRefused, match=reason):
        validate(msgspec.structs.replace(record(), teacher=teacher), VOCABULARY)


def test_rows_that_say_how_likely_their_refusals_were_pass_and_so_do_those_of_before_that_was_written_down() -> None:
    said = msgspec.structs.replace(record(), teacher=rows(refusals=(0.25, 0.0)))
    validate(said, VOCABULARY)
    assert said.teacher.refusal_chances().tolist() == [0.25, 0.0]
    assert said.teacher.at([5]).refusal_chances().tolist() == [0.0]
    fields = list(msgspec.structs.astuple(rows()))[:-1]
    before = msgspec.convert(fields, TeacherRows)
    assert before == rows()
    assert before.refusal_chances().tolist() == [0.0, 0.0]


def test_a_greedy_token_that_its_own_teacher_row_did_not_choose_is_refused() -> None:
    swapped = rows(ids=((2, 50, 51), (50, 5, 51)))
    with pytest.raises(RecordRefused, match="greedy token at output index 5 is not the one its teacher row finds"):
        validate(msgspec.structs.replace(record(), teacher=swapped), VOCABULARY)
    absent = rows(ids=((50, 51, 52), (5, 50, 51)))
    with pytest.raises(RecordRefused, match="greedy token at output index 2"):
        validate(msgspec.structs.replace(record(), teacher=absent), VOCABULARY)


def test_a_near_tie_is_no_contradiction() -> None:
    tie = rows(ids=((50, 2, 51), (5, 50, 51)), log_probs=((-0.75, -0.875, -3.0), (-0.5, -1.5, -3.0)))
    validate(msgspec.structs.replace(record(), teacher=tie), VOCABULARY)
    single = rows(ids=((50,), (5,)), log_probs=((-0.7,), (-0.5,)))  # what tied with the first was cut off
    validate(msgspec.structs.replace(record(), teacher=single), VOCABULARY)


@pytest.mark.parametrize("other", [{"temperature": 0.7}, {"adjusted": True}, {"structured": True}], ids=str)
def test_only_plainly_greedy_text_must_be_the_rows_first_choice(other: dict[str, Any]) -> None:
    validate(msgspec.structs.replace(record(), teacher=rows(ids=((50, 2, 51), (50, 5, 51))), **other), VOCABULARY)


def test_without_a_target_all_but_the_vocabulary_is_checked() -> None:
    validate_figures(record(prompt_ids=int32([10**6])))
    with pytest.raises(RecordRefused, match="whole int32"):
        validate_figures(record(output_ids=b"12345"))
    with pytest.raises(RecordRefused, match="finished at nan"):
        validate_figures(record(finished_at=NAN))
