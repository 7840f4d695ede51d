"""The choice of the draft vocabulary."""

import numpy as np

from adapter.vocabulary import choose_draft_vocabulary, count_tokens


def test_tokens_are_counted_over_all_sequences() -> None:
    sequences = [np.array([1, 1, 3], dtype=np.int32), np.array([], dtype=np.int32), np.array([3], dtype=np.int32)]
    assert count_tokens(sequences, 5).tolist() == [0, 2, 0, 2, 0]


def test_what_the_target_emits_most_comes_first() -> None:
    chosen = choose_draft_vocabulary(np.array([0, 5, 1, 9]), np.array([99, 0, 0, 0]), size=2)
    assert chosen.tolist() == [1, 3]


def test_then_what_the_prompts_hold_then_the_lowest_ids() -> None:
    emitted, prompted = np.array([0, 0, 0, 0, 4, 0]), np.array([0, 0, 0, 3, 0, 0])
    assert [choose_draft_vocabulary(emitted, prompted, n).tolist() for n in (1, 2, 3, 4)] == [
        [4],
        [3, 4],
        [0, 3, 4],
        [0, 1, 3, 4],
    ]


def test_special_tokens_are_always_in() -> None:
    assert choose_draft_vocabulary(np.array([5, 5, 0, 0]), np.zeros(4, int), 2, always=[3]).tolist() == [0, 3]


def test_a_size_above_the_vocabulary_gives_all_of_it() -> None:
    assert choose_draft_vocabulary(np.zeros(4, int), np.zeros(4, int), 10).tolist() == [0, 1, 2, 3]
