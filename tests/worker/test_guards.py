"""The guards on a stretch of the stream: what is kept, what is left out, and the count of each."""

from datetime import UTC, datetime

import msgspec
import pytest

from service.hosts.capabilities import HOSTS
from storage.records import FeedbackRecord, int32
from storage.registry import Drafter
from tests.worker.entries import VOCABULARY, copies, entries, ids, said
from worker.config import TriggerConfig
from worker.guards import CROWDING, NOT_LEARNABLE, QUARANTINED, REPEATED, Sifted, content, distinct, sift

DRAFTER = Drafter(1, "chat", "causal_lm", "target-1", "tokenizer-1", {}, datetime.now(UTC), None)
CONFIG = TriggerConfig(window_records=20, window_copies=3, window_share=0.75)


def sifted(records: list[FeedbackRecord], config: TriggerConfig = CONFIG) -> Sifted:
    return sift(entries(records), DRAFTER, VOCABULARY, config)


def test_sound_and_distinct_records_are_all_kept_in_order() -> None:
    records = [said(n) for n in range(20)]
    found = sifted(records)
    assert found.kept == records
    assert (found.left_out_ids, found.refused, dict(found.left_out)) == ([], [], {})


def test_of_one_request_repeated_a_few_copies_stay() -> None:
    found = sifted([*copies(said(1), 15), said(2), said(3)])
    assert ids(found.kept) == ["r1-0", "r1-1", "r1-2", "r2", "r3"]
    assert (found.left_out[REPEATED], len(found.left_out_ids)) == (12, 12)
    assert found.reasons[REPEATED] == "an identical prompt and output, beyond 3 copies"


def test_the_same_prompt_with_other_outputs_is_no_repetition() -> None:
    records = [msgspec.structs.replace(said(1), record_id=f"o{n}", output_ids=int32([n, 5])) for n in range(10)]
    assert sifted(records).kept == records


def test_where_the_prompt_ends_is_part_of_what_was_said() -> None:
    one, other = (said(1, prompt_ids=int32(p), output_ids=int32(o)) for p, o in (([1, 2], [3]), ([1], [2, 3])))
    assert content(one) != content(other)


def test_distinct_counts_copies_over_all_records() -> None:
    records = [*copies(said(1), 5), said(2), *copies(said(1), 5)]
    assert ids(distinct(records, 2)) == ["r1-0", "r1-1", "r2"]


def test_a_workload_that_floods_the_stream_gets_its_share_and_others_are_looked_for_further_on() -> None:
    flood = [said(n, workload="flood") for n in range(80)]
    others = [said(100 + n, workload="quiet") for n in range(8)]
    records = [r for n, other in enumerate(others) for r in (*flood[10 * n : 10 * n + 10], other)]
    found = sifted(records)
    assert [r.workload for r in found.kept].count("flood") == 15
    assert [r.workload for r in found.kept].count("quiet") == 5
    assert found.left_out == {CROWDING: 4}  # of the first 20 entries; those further on await a later window
    assert found.reasons[CROWDING] == "one workload had its share of 0.75 of a window"


def test_a_tenant_that_floods_the_stream_gets_its_share_under_whatever_labels() -> None:
    records = [said(n, workload=f"w{n}", tenant="flood") for n in range(19)]
    found = sifted([*records, said(99, tenant="quiet")])
    assert [r.tenant for r in found.kept].count("flood") == 15
    assert found.left_out == {CROWDING: 4}
    assert "flood" not in found.reasons[CROWDING]  # tenants are named in no count


def test_alone_a_workload_may_have_the_whole_window() -> None:
    found = sifted([said(n) for n in range(20)])
    assert (len(found.kept), found.flooded) == (20, False)


def test_one_foreign_request_costs_the_others_no_more_than_the_share() -> None:
    found = sifted([*(said(n) for n in range(19)), said(99, workload="odd")])
    assert (len(found.kept), found.left_out[CROWDING]) == (16, 4)


def test_a_window_is_no_longer_than_it_may_be_and_the_rest_stays() -> None:
    found = sifted([said(n) for n in range(30)])
    assert (len(found.kept), found.left_out_ids) == (20, [])


def test_what_cannot_be_decoded_or_is_unsound_is_for_the_quarantine() -> None:
    stretch = [*entries([said(1)]), (b"8-0", b"rubbish"), (b"9-0", entries([said(2, prompt_ids=int32([5000]))])[0][1])]
    found = sift(stretch, DRAFTER, VOCABULARY, CONFIG)
    assert ids(found.kept) == ["r1"]
    assert [r.entry_id for r in found.refused] == [b"8-0", b"9-0"]
    assert found.left_out == {QUARANTINED: 2}
    assert found.reasons[QUARANTINED] == "prompt ids outside the vocabulary of 1000"


@pytest.mark.parametrize(
    "changes",
    [
        {"train": False}, {"structured": True}, {"lossless": False},
        {"target_fingerprint": "another"}, {"tokenizer_fingerprint": "another"}, {"output_ids": int32([1])},
    ],
    ids=str,
)  # fmt: skip
def test_what_teaches_nothing_is_left_out_and_counted(changes: dict[str, object]) -> None:
    found = sifted([said(1), said(2, **changes)])
    assert ids(found.kept) == ["r1"]
    assert found.left_out == {NOT_LEARNABLE: 1}


@pytest.mark.parametrize("source", ["sidecar", *HOSTS])
def test_structured_output_teaches_nothing_whatever_host_it_came_from(source: str) -> None:
    found = sifted([said(1, source=source), said(2, source=source, structured=True)])
    assert ids(found.kept) == ["r1"]
    assert found.left_out == {NOT_LEARNABLE: 1}
