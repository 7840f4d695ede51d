"""Cutting members out of JSON text."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.hosts.sidecar.excision import NotPlain, becomes, each, edited, gone, members, with_member

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
objects = st.dictionaries(st.text(max_size=5), values, max_size=6)
layouts = st.sampled_from([{}, {"indent": 1}, {"separators": (",", ":")}, {"ensure_ascii": False}])


@given(objects, layouts, st.data())
def test_what_is_cut_is_missing_and_every_other_byte_stays(plain: dict[str, Any], layout: Any, data: Any) -> None:
    text = json.dumps(plain, **layout).encode()
    cut = data.draw(st.sets(st.sampled_from(sorted(plain)))) if plain else set()
    left = {key: value for key, value in plain.items() if key not in cut}
    found = edited(text, dict.fromkeys(cut, gone))
    assert json.loads(found) == left
    if left:
        assert found == json.dumps(left, **layout).encode()


@given(objects, layouts)
def test_nothing_to_cut_changes_no_byte(plain: dict[str, Any], layout: Any) -> None:
    text = json.dumps(plain, **layout).encode()
    assert edited(text, {"a key that nobody has": gone}) == text


@given(objects, values)
def test_a_member_that_is_added_replaces_the_old_one(plain: dict[str, Any], value: Any) -> None:
    text = with_member(json.dumps(plain).encode(), "n", json.dumps(value).encode())
    assert json.loads(text) == {**plain, "n": value}
    assert [member.key for member in members(text)] == list({**plain, "n": value})


def test_numbers_escapes_and_spaces_stay_as_they_were_written() -> None:
    text = b'{ "a" : 1.50e+01 ,"cut":[{"x":"}"},"\\""], "b":"\\u00e9\\/" }'
    assert edited(text, {"cut": gone}) == b'{ "a" : 1.50e+01, "b":"\\u00e9\\/" }'


def test_each_object_of_an_array_is_edited() -> None:
    text = b'{"choices":[{"i":0,"t":[1]} , {"i":1,"t":[2]}],"id":"t"}'
    assert edited(text, {"choices": each({"t": becomes(b"null")})}) == (
        b'{"choices":[{"i":0,"t":null} , {"i":1,"t":null}],"id":"t"}'
    )


@pytest.mark.parametrize("text", [b'{"a":1,"a":2}', b"[1]", b"", b'{"a":', b"null", b'{"a":1} {"b":2}', b'{"a":\xff}'])
def test_what_is_no_plain_object_is_refused(text: bytes) -> None:
    with pytest.raises(NotPlain):
        members(text)
