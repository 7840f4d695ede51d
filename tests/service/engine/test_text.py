"""Text from tokens: whole characters only, and nothing that a stop string may yet swallow."""

import pytest

from service.engine.text import TextStream
from tests.tiny import tiny_tokenizer


def released(text: str, stop: tuple[str, ...] = ()) -> tuple[list[str], TextStream]:
    tokenizer = tiny_tokenizer()
    stream = TextStream(tokenizer, stop)
    pieces = []
    for token in tokenizer.encode(text):
        pieces.append(stream.push(token))
        if stream.stopped:
            break
    return pieces, stream


@pytest.mark.parametrize(
    "text", ["def add(first, second): return", "  spaces\n\n and\ttabs ", "naïve 한국어 🙂 日本", ""]
)
def test_the_pieces_add_up_to_the_text(text: str) -> None:
    pieces, stream = released(text)
    assert "".join(pieces) + stream.flush() == text


def test_no_piece_holds_half_a_character() -> None:
    pieces, _ = released("🙂🙂 한국어")
    assert all("\ufffd" not in piece for piece in pieces)


def test_a_stop_string_across_tokens_is_cut_off() -> None:
    pieces, stream = released("the target verifies them in one pass", stop=("ifies th",))
    assert stream.stopped
    assert "".join(pieces) + stream.flush() == "the target ver"


def test_the_start_of_a_stop_string_is_held_back_until_it_is_none() -> None:
    pieces, stream = released("aaab", stop=("aaaa",))
    assert "".join(pieces) + stream.flush() == "aaab"
    assert not stream.stopped


def test_the_first_of_several_stop_strings_wins() -> None:
    pieces, _ = released("one two three", stop=("three", "two"))
    assert "".join(pieces) == "one "
