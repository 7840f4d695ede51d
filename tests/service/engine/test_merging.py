"""Several drafters' proposals as one of a batch: apart, and two of one row in one tree."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from adapter.drafters.protocol import Proposal
from service.engine.merging import Part, Tree, first_of, merged, together


def paths(tree: Tree) -> set[tuple[int, ...]]:
    """The tokens on the way to each node."""
    found: list[tuple[int, ...]] = []
    for token, parent in zip(tree.tokens, tree.parents, strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return set(found)


@st.composite
def trees(draw: st.DrawFn) -> Tree:
    """Of few tokens, so that they have paths in common; siblings are different ones, as drafters' are."""
    tree, taken = Tree(), set[tuple[int, int]]()
    for _ in range(draw(st.integers(0, 8))):
        parent = draw(st.integers(-1, len(tree.tokens) - 1))
        token = draw(st.sampled_from([t for t in range(12) if (parent, t) not in taken]))
        taken.add((parent, token))
        tree.tokens.append(token)
        tree.parents.append(parent)
        tree.kept.append(draw(st.integers(-1, 9)))
    return tree


@given(st.lists(trees(), max_size=3))
def test_a_tree_of_several_has_each_of_their_paths_once(several: list[Tree]) -> None:
    whole = merged(several)
    assert paths(whole) == set().union(*map(paths, several))
    assert len(whole.tokens) == len(paths(whole))
    assert all(parent < node for node, parent in enumerate(whole.parents))


@given(trees(), trees())
def test_the_first_one_stands_first_and_as_it_was(first: Tree, second: Tree) -> None:
    whole, count = merged([first, second]), len(first.tokens)
    assert (whole.tokens[:count], whole.parents[:count]) == (first.tokens, first.parents)


def test_where_a_drafter_remembers_a_token_the_tree_says_so_whoever_named_it_first() -> None:
    match, own = Tree([5, 6], [-1, 0], [-1, -1]), Tree([5, 7], [-1, 0], [0, -1])
    assert merged([match, own]) == Tree([5, 6, 7], [-1, 0, 0], [0, -1, -1])


def chain(*rows: list[int]) -> Tensor:
    return torch.tensor(rows)


def test_two_proposals_of_a_row_are_one_tree_and_other_rows_keep_theirs() -> None:
    """Row 0 has a match and a chain of its drafter, row 1 a chain alone, row 2 nothing."""
    match = Part.of([0], [2], Proposal(chain([5, 6]), (), chain([-1, 0]), [2]))
    own = Part.of([0, 1], [3, 2], Proposal(chain([5, 8, 9], [1, 2, 3])))
    made = together(3, [match, own])
    assert made.tokens.tolist() == [[5, 6, 8, 9], [1, 2, 0, 0], [0, 0, 0, 0]]
    assert made.parents is not None
    assert made.parents.tolist() == [[-1, 0, 0, 2], [-1, 0, -1, -1], [-1, -1, -1, -1]]
    assert made.lengths == [4, 2, 0]
    assert made.kept is not None
    assert made.kept.tolist() == [[0, -1, 1, -1], [0, 1, -1, -1], [-1, -1, -1, -1]]
    assert first_of([match, own]) == {0: 2}


def test_proposals_of_different_rows_stay_chains() -> None:
    one, other = Part.of([2], [1], Proposal(chain([7]))), Part.of([0], [2], Proposal(chain([1, 2])))
    made = together(3, [one, other])
    assert (made.tokens.tolist(), made.lengths, made.parents) == ([[1, 2], [0, 0], [7, 0]], [2, 0, 1], None)
    assert first_of([one, other]) == {}
