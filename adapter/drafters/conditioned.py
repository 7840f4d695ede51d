"""How drafters that are conditioned on the target's hidden states propose: from the one vector kept for each row.

In the paper's words the target says x[t + 1] from h[t]; the drafter then has h[t] and x[t + 1], and says x[t + 2]. So
at index i of a sequence it reads the hidden state of the token before, and its depth j predicts token i + 1 + j.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from adapter.drafters.learnt import LearntDrafter
from adapter.drafters.protocol import DraftRow, FollowRow, Level, Proposal, Shape, Step
from adapter.drafters.tree import grow
from adapter.processing import DraftVocabulary


def kept_states(rows: Sequence[DraftRow]) -> Tensor:
    """[B, S]: what `follow` gave for the rows."""
    states = [row.state for row in rows if row.state is not None]
    assert len(states) == len(rows), "a row without a state is never asked"
    return torch.stack(states)


def last_states(rows: Sequence[FollowRow], states: Tensor) -> Tensor:
    """Of states [B, n, S], those of each row's last real token: [B, S]."""
    last = torch.tensor([len(row.following) - 1 for row in rows], device=states.device)
    return states[torch.arange(len(rows), device=states.device), last]


def propose_apart(drafter: LearntDrafter, rows: list[DraftRow], shape: Shape, at: Callable[[int], Tensor]) -> Proposal:
    """A proposal of a drafter that looks at none of its own tokens: from the logits [B, V_d] `at` each depth from 0 on.

    Row by row all nodes of a depth have the same to choose from, so a tree is a part of a Cartesian product.
    """

    def step(level: Level) -> Tensor:
        return at(level.depth)[:, None].expand(-1, level.tokens.shape[1], -1)

    return propose(drafter, rows, shape, at(0), step)


def propose(drafter: LearntDrafter, rows: list[DraftRow], shape: Shape, first: Tensor, step: Step) -> Proposal:
    """A proposal from the logits `first` [B, V_d] and those of `step`, no deeper than the drafter has depths."""
    vocabulary = DraftVocabulary(drafter.draft_to_target, drafter.target_to_draft)
    most = drafter.depths
    made = grow(rows, no_deeper(shape, most), vocabulary, [row.start for row in rows], first, step)
    if made.lengths is not None or shape.depth <= most:
        return made
    return replace(made, lengths=[min(row.draft_length, most) for row in rows])


def no_deeper(shape: Shape, most: int) -> Shape:
    """The shape without what lies deeper than `most`."""
    if shape.depth <= most:
        return shape
    if shape.is_chain:
        return Shape.chain(most)
    form = _cut(shape.form, most)
    return replace(shape, depth=most, nodes=len(form) or shape.nodes, form=form)


def _cut(form: Sequence[int], most: int) -> tuple[int, ...]:
    """A form's nodes down to that depth, numbered anew."""
    depths: list[int] = []
    for parent in form:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    kept = [node for node, depth in enumerate(depths) if depth <= most]
    numbers = {node: number for number, node in enumerate(kept)} | {-1: -1}
    return tuple(numbers[form[node]] for node in kept)


def shifted(hidden: Tensor, by: int) -> Tensor:
    """Along the sequence of [B, n, F]: index i holds what stood at i - by; zeros come in."""
    if by == 0:
        return hidden
    moved = torch.zeros_like(hidden)
    if by > 0:
        moved[:, by:] = hidden[:, :-by]
    else:
        moved[:, :by] = hidden[:, -by:]
    return moved
