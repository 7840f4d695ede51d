"""What the guards left out is counted, by drafter and guard."""

from sqlalchemy import Engine

from storage import left_out
from storage.registry import Registry
from tests.storage.rows import make_drafter


def test_counts_add_up_and_the_newest_reason_stands(engine: Engine) -> None:
    make_drafter(Registry(engine))
    left_out.count(engine, "chat", {"repeated": 3, "quarantined": 1}, {"quarantined": "empty prompt"})
    left_out.count(engine, "chat", {"quarantined": 2}, {"quarantined": "teacher rows without a top-K"})
    found = left_out.totals(engine, "chat")
    assert [(f.guard, f.records, f.reason) for f in found] == [
        ("quarantined", 3, "teacher rows without a top-K"),
        ("repeated", 3, ""),
    ]


def test_nothing_left_out_adds_nothing(engine: Engine) -> None:
    make_drafter(Registry(engine))
    left_out.count(engine, "chat", {}, {})
    assert left_out.totals(engine, "chat") == []
