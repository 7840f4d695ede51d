"""Masks of structured output: what may follow, along drafts and past commits, and what is refused."""

import json
import random
import re
import time
from typing import Any

import pytest
import torch

from adapter.grammar_trial import CPU_SECONDS, trial
from adapter.spelling import Spelling, spelling
from adapter.structured import (
    LARGEST,
    GrammarConstraint,
    GrammarRefused,
    MinimumLength,
    choice_grammar,
    constrain,
    free_grammar,
    json_grammar,
    regex_grammar,
)
from adapter.target import Target

PADDING = 13
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "kind": {"enum": ["red", "green"]},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def spelled(target: Target) -> Spelling:
    """The tiny target's spelling, as if its vocabulary were padded and it had two ends of text."""
    both = frozenset({0, 1})
    return spelling(Target(**{**vars(target), "vocab_size": target.vocab_size + PADDING, "eos_ids": both}))


def tokens(spelled: Spelling, text: str) -> list[int]:
    return spelled.tokenizer.tokenize_str(text)


def allowed(constraint: GrammarConstraint, drafted: list[int]) -> set[int]:
    return set(constraint.allowed(drafted).nonzero()[:, 0].tolist())


def random_text(spelled: Spelling, constraint: GrammarConstraint, seed: int, draft: int) -> str:
    """A walk over allowed tokens, uniformly drawn and committed `draft` at a time."""
    rng = random.Random(seed)
    output: list[int] = []
    drafted: list[int] = []
    for _ in range(1000):
        drafted.append(rng.choice(sorted(allowed(constraint, drafted))))
        if drafted[-1] in {0, 1} or len(drafted) == draft:
            constraint.commit(drafted)
            output += drafted
            drafted = []
        if output and output[-1] in {0, 1}:
            return spelled.tokenizer.decode_bytes(output[:-1]).decode()
    raise AssertionError("a walk that does not end")


@pytest.mark.parametrize("draft", [1, 4])
def test_any_walk_over_allowed_tokens_ends_in_json_under_the_schema(spelled: Spelling, draft: int) -> None:
    for seed in range(20):
        value = json.loads(random_text(spelled, constrain(spelled, json_grammar(PERSON)), seed, draft))
        assert list(value) == ["name", "age", "kind"]
        assert isinstance(value["name"], str)
        assert len(value["name"]) <= 6
        assert 0 <= value["age"] <= 120
        assert value["kind"] in {"red", "green"}


def blanks(spelled: Spelling, compact: bool) -> list[str]:
    """What stands between the values of some random JSON, blank by blank run."""
    found: list[str] = []
    for seed in range(20):
        text = random_text(spelled, constrain(spelled, json_grammar(PERSON, compact)), seed, 4)
        found += re.findall(r"\s+", re.sub(r'"(\\.|[^"\\])*"', '""', text))
    return found


def test_json_may_be_laid_out_but_not_with_endless_blanks(spelled: Spelling) -> None:
    found = blanks(spelled, compact=False)
    assert max(map(len, found)) <= 40
    assert {"\n", " "} <= set("".join(found))
    assert blanks(spelled, compact=True) == []


def test_a_walk_under_a_regular_expression_matches_it_as_a_whole(spelled: Spelling) -> None:
    pattern = "(ab|c){2,5}[0-9]{3}é?"
    for seed in range(20):
        assert re.fullmatch(pattern, random_text(spelled, constrain(spelled, regex_grammar(pattern)), seed, 3))


CHOICES = ["yes", "yes, but", 'a "quoted"\\ one', "two\nlines", "né😀", "/[a-z]+/", "$1 %json { | }"]


@pytest.mark.parametrize("choice", CHOICES)
def test_each_choice_may_be_said_to_the_letter(spelled: Spelling, choice: str) -> None:
    constraint = constrain(spelled, choice_grammar(CHOICES))
    said = tokens(spelled, choice)
    for at, token in enumerate(said):
        assert token in allowed(constraint, said[:at])
        so_far = spelled.tokenizer.decode_bytes(said[:at])
        assert (0 in allowed(constraint, said[:at])) == (so_far == b"yes")
    assert 0 in allowed(constraint, said)


def test_a_thousand_choices_are_no_burden_to_the_parser(spelled: Spelling) -> None:
    constraint = constrain(spelled, choice_grammar([f"item {n}" for n in range(3000)]))
    assert allowed(constraint, tokens(spelled, "item 2999")) == {0, 1}


@pytest.mark.parametrize("grammar", ['root ::= "a" tail\ntail ::= "b" | "c"', 'start: "a" TAIL\nTAIL: "b" | "c"'])
def test_a_grammar_may_be_gbnf_or_lark(spelled: Spelling, grammar: str) -> None:
    constraint = constrain(spelled, free_grammar(grammar))
    texts = {spelled.tokenizer.decode_bytes([token]) for token in allowed(constraint, tokens(spelled, "a"))}
    assert texts == {b"b", b"c"}


def test_every_end_of_text_is_allowed_where_the_grammar_may_end_and_nothing_else_once_it_must(
    spelled: Spelling,
) -> None:
    constraint = constrain(spelled, regex_grammar("[0-9]{1,2}"))
    one, two = tokens(spelled, "7"), tokens(spelled, "42")
    assert not allowed(constraint, []) & {0, 1}
    assert allowed(constraint, one) >= {0, 1, *tokens(spelled, "5")}
    assert allowed(constraint, two) == {0, 1}
    constraint.commit([*two, 1])
    assert allowed(constraint, []) == allowed(constraint, [5]) == {0, 1}
    assert constraint.fault == ""


def test_padding_and_special_tokens_are_never_allowed(spelled: Spelling) -> None:
    constraint = constrain(spelled, free_grammar("start: /(.|\\n)*/"))
    mask = constraint.allowed([])
    assert mask.shape == (spelled.vocab_size,)
    assert mask.dtype == torch.bool
    assert mask[: spelled.known].sum() > spelled.known / 2
    assert not mask[spelled.known :].any()


def test_masks_do_not_depend_on_what_was_drafted_before(spelled: Spelling) -> None:
    constraint, fresh = (constrain(spelled, json_grammar(PERSON, compact=True)) for _ in range(2))
    said = tokens(spelled, '{"name":"ab","age":7,"kind":"red"}')
    strayed = [*said[:3], *tokens(spelled, "]]"), 0, 5]
    for committed in range(0, len(said), 2):
        for drafted in ([*said[committed : committed + 3]], strayed, [0], [], said[committed : committed + 1]):
            constraint.allowed(drafted)
        for ahead in range(3):
            drafted = said[committed : committed + ahead]
            assert torch.equal(constraint.allowed(drafted), fresh.allowed(drafted))
        constraint.commit(said[committed : committed + 2])
        fresh.commit(said[committed : committed + 2])
    assert allowed(constraint, []) == {0, 1}


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ({"type": "objekt"}, "objekt"),
        ({"not": {"type": "string"}}, "not"),
        ({"type": "string", "pattern": "[0-9"}, "regex"),
        ({"$ref": "http://example.com/schema"}, "example.com"),
        ({"enum": []}, "Unsatisfiable"),
        ({"enum": ["x" * LARGEST]}, str(LARGEST)),
    ],
)
def test_a_schema_that_cannot_be_followed_is_refused_with_the_reason(
    spelled: Spelling, schema: dict[str, Any], says: str
) -> None:
    with pytest.raises(GrammarRefused, match=says):
        constrain(spelled, json_grammar(schema))


def test_a_schema_nested_without_end_is_refused(spelled: Spelling) -> None:
    schema: dict[str, Any] = {}
    for _ in range(5000):
        schema = {"items": schema}
    with pytest.raises(GrammarRefused, match="nested"):
        json_grammar(schema)


@pytest.mark.parametrize("write", [regex_grammar, free_grammar])
def test_a_grammar_over_the_size_limit_is_refused_before_it_is_parsed(write: Any) -> None:
    with pytest.raises(GrammarRefused, match=str(LARGEST)):
        write("a" * (LARGEST + 1))


def test_a_small_schema_that_would_take_minutes_is_refused_in_time(spelled: Spelling) -> None:
    schema = {"anyOf": [{"type": "integer", "multipleOf": step} for step in (99_999, 99_997, 99_995, 99_993)]}
    began = time.process_time()
    with pytest.raises(GrammarRefused, match=f"more than {CPU_SECONDS} s of a processor"):
        constrain(spelled, json_grammar(schema))
    assert time.process_time() - began < 1  # spent elsewhere


def test_a_grammar_is_tried_once(spelled: Spelling) -> None:
    grammar = regex_grammar("tried [0-9]{3}")
    before = trial.cache_info()
    constrain(spelled, grammar)
    constrain(spelled, grammar)
    after = trial.cache_info()
    assert (after.misses - before.misses, after.hits - before.hits) == (1, 1)


@pytest.mark.parametrize("text", ["", "start: missing", "root ::= (", "%$"])
def test_a_grammar_that_is_none_is_refused(spelled: Spelling, text: str) -> None:
    with pytest.raises(GrammarRefused):
        constrain(spelled, free_grammar(text))


def test_a_grammar_that_explodes_midway_ends_the_output_and_says_so(spelled: Spelling) -> None:
    constraint = constrain(spelled, regex_grammar("(.*a.{1,200}){20}"))
    word = tokens(spelled, "ab" * 3)
    for _ in range(200):
        if allowed(constraint, word) == {0, 1}:
            break
        constraint.commit(word)
    assert constraint.fault == ""  # so far only a draft came to it
    constraint.commit(word)
    assert allowed(constraint, []) == {0, 1}
    constraint.commit([0])
    assert "too many" in constraint.fault


def test_a_target_without_an_end_of_text_takes_no_grammar(target: Target) -> None:
    endless = spelling(Target(**{**vars(target), "eos_ids": frozenset()}))
    with pytest.raises(GrammarRefused, match="end-of-text"):
        constrain(endless, regex_grammar("a"))


def test_an_output_does_not_end_before_its_least_length() -> None:
    constraint = MinimumLength(3, frozenset({0, 2}), 6)
    assert constraint.allowed([4, 4]).tolist() == [False, True, False, True, True, True]
    assert constraint.allowed([4, 4, 4]).all()
    constraint.commit([4, 4])
    assert not constraint.allowed([])[0]
    assert constraint.allowed([4]).all()


def test_tokens_are_spelled_in_bytes(target: Target, spelled: Spelling) -> None:
    for text in ("the target verifies", "né😀"):
        ids = target.tokenizer(text)["input_ids"]
        assert b"".join(spelled.token_bytes(token) or b"" for token in ids).decode() == text
    assert spelled.token_bytes(spelled.known) is None
    assert [spelled.is_special(token) for token in (0, 1, 2, spelled.known)] == [True, True, False, True]
