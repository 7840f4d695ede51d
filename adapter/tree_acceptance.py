"""The decision on trees: each row walks from its last token down, and stays at a node where no child is accepted.

Greedy and seeded rows go to the child that is the target's own choice, sampled rows to the one that recursive
rejection accepts (adapter/acceptance), so the text is what plain decoding would give, whatever the tree. Rows step
together, a depth a step; only the nodes that are reached are looked at. Rows that asked for typical acceptance, which
is lossy, are decided on all paths at once (adapter/typical).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from adapter.acceptance import Drawn, verify_siblings
from adapter.processing import probabilities
from adapter.sampling import Sampler, adjust, choices_of, lenient_rows, note_refusals, parts_of, rules_of, uniforms_of
from adapter.typical import verify_typical_tree


@dataclass
class Walk:
    """One row's way through its tree."""

    row: int
    tokens: list[int]
    children: dict[int, list[int]]  # of each node, in the order in which they are tried; -1: the last committed token
    path: list[int] = field(default_factory=list)  # accepted nodes
    following: int | None = None  # the next token, once the walk has ended

    @property
    def node(self) -> int:
        return self.path[-1] if self.path else -1

    @property
    def drafted(self) -> list[int]:
        return [self.tokens[node] for node in self.path]

    @property
    def ahead(self) -> list[int]:
        """The nodes that may follow."""
        return self.children.get(self.node, [])

    def take(self, token: int) -> None:
        """Go on to the child that is this token, or end before it."""
        named = [node for node in self.ahead if self.tokens[node] == token]
        if named:
            self.path.append(named[0])
        else:
            self.following = token


def verify_tree(
    samplers: Sequence[Sampler],
    lengths: Sequence[int],
    tokens: Tensor,
    parents: Tensor,
    drawn: Sequence[Drawn],
    logits: Tensor,
) -> list[tuple[list[int], int]]:
    """The accepted nodes and the next token of each row.

    tokens and parents [B, n], of which lengths[i] are real; logits [B, n + 1, V]: the target's after each row's last
    token, and after each node. Sampled rows in none of `drawn` have chosen children, or none.
    """
    walks = [
        _walk(*each) for each in zip(range(len(samplers)), lengths, tokens.tolist(), parents.tolist(), strict=True)
    ]
    parts = parts_of(samplers, tokens, drawn)
    if lenient := lenient_rows(samplers):
        _take_typical(samplers, [walks[row] for row in lenient], parents, logits)
    while active := [walk for walk in walks if walk.following is None]:
        _step(samplers, active, parts, logits)
    return [(walk.path, walk.following) for walk in walks if walk.following is not None]


def _walk(row: int, length: int, tokens: list[int], parents: list[int]) -> Walk:
    children: dict[int, list[int]] = {}
    for node in range(length):
        children.setdefault(parents[node], []).append(node)
    return Walk(row, tokens, children)


def _take_typical(samplers: Sequence[Sampler], walks: list[Walk], parents: Tensor, logits: Tensor) -> None:
    """The whole way of lenient rows."""
    rows = [walk.row for walk in walks]
    tokens, here = torch.tensor([walk.tokens for walk in walks], device=logits.device), logits[rows]
    if any(samplers[row].adjusts for row in rows):
        here = here.to(torch.float32, copy=True)
        for at, walk in enumerate(walks):
            if samplers[walk.row].adjusts:
                _adjust_everywhere(samplers[walk.row], walk, here[at])
    p = probabilities(here, [samplers[row].policy for row in rows])
    lengths = [sum(map(len, walk.children.values())) for walk in walks]
    uniforms = uniforms_of(samplers, rows, 1, p.device)[:, 0]
    decided = verify_typical_tree(p, tokens, parents[rows], lengths, rules_of(samplers, rows), uniforms)
    for walk, (path, following) in zip(walks, decided, strict=True):
        walk.path, walk.following = path, following


def _adjust_everywhere(sampler: Sampler, walk: Walk, here: Tensor) -> None:
    """Change the logits [n + 1, V] of one row in place, each node's by the tokens on the way to it."""
    ways: list[tuple[int, list[int]]] = [(-1, [])]
    while ways:
        node, drafted = ways.pop()
        adjust(sampler, here[node + 1 : node + 2], drafted, None)
        ways += [(child, [*drafted, walk.tokens[child]]) for child in walk.children.get(node, [])]


def _step(samplers: Sequence[Sampler], active: list[Walk], parts: Sequence[Drawn], logits: Tensor) -> None:
    """One depth further for the rows that are still on their way; all of them are equally deep."""
    rows = torch.tensor([walk.row for walk in active], device=logits.device)
    nodes = torch.tensor([walk.node + 1 for walk in active], device=logits.device)
    here = _adjusted(samplers, active, logits[rows, nodes])
    ours = [samplers[walk.row] for walk in active]
    depth = len(active[0].path)
    if any(not sampler.sampled for sampler in ours):
        choices = choices_of(ours, here[:, None], depth, None)[:, 0].tolist()
        for walk, sampler, choice in zip(active, ours, choices, strict=True):
            if not sampler.sampled:
                walk.take(choice)
    for part in parts:
        at = [i for i, walk in enumerate(active) if walk.row in part.rows]
        if at:
            _sampled_step(samplers, part, [active[i] for i in at], here[at])


def _sampled_step(samplers: Sequence[Sampler], part: Drawn, walks: list[Walk], here: Tensor) -> None:
    """The same for sampled rows of one part, by the logits [A, V] where they are."""
    rows = [walk.row for walk in walks]
    p = probabilities(here[:, None], [samplers[row].policy for row in rows])[:, 0]
    most = max(len(walk.ahead) for walk in walks)
    counts = torch.tensor([len(walk.ahead) for walk in walks], device=p.device)
    nodes = torch.tensor([walk.ahead + [0] * (most - len(walk.ahead)) for walk in walks], device=p.device)
    mine = torch.tensor([part.rows.index(row) for row in rows], device=p.device)
    tokens = part.tokens[mine[:, None], nodes] if most else p.new_empty(len(walks), 0, dtype=torch.long)
    q = None if part.q is None or not most else part.at(nodes[:, 0], p.shape[-1], mine)
    uniforms = uniforms_of(samplers, rows, most + 1, p.device)
    accepted, following, chances = verify_siblings(p, q, tokens, counts, uniforms, part.replaced)
    note_refusals([samplers[row] for row in rows], chances)
    for walk, child, token in zip(walks, accepted.tolist(), following.tolist(), strict=True):
        if child >= 0:
            walk.path.append(walk.ahead[child])
        else:
            walk.following = token


def _adjusted(samplers: Sequence[Sampler], active: list[Walk], here: Tensor) -> Tensor:
    """Logits [A, V], changed where rows are constrained, biased or penalised, each by its own path."""
    if not any(samplers[walk.row].adjusts for walk in active):
        return here
    here = here.to(torch.float32, copy=True)
    for i, walk in enumerate(active):
        if samplers[walk.row].adjusts:
            adjust(samplers[walk.row], here[i : i + 1], walk.drafted, None)
    return here
