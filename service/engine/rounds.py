"""One round over the rows that decode: propose, verify, accept. Nothing here knows of queues, text or clients."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import takewhile
from time import perf_counter

import torch
from torch import Tensor

from adapter.drafters.protocol import Branches, Proposal, Shape
from adapter.target import Target
from service.engine.accept import Outcome, accept
from service.engine.following import Shown, followers, reading, ready
from service.engine.generation import Row
from service.engine.proposing import Ask, nothing, propose
from service.engine.pruning import pruning_of
from service.engine.residents import Resident
from service.engine.slots import Slots


@dataclass(frozen=True)
class Plan:
    """What is to be proposed for each row: in which shape, and how deep that is to go; 0 for none of it."""

    shape: Shape  # of what drafters propose
    lengths: list[int]
    lookup: Shape  # of what is proposed out of n-gram matches, instead of it or beside it
    matched: list[int]

    @property
    def depths(self) -> list[int]:
        """How deep all of a row's proposal is to go."""
        return [max(both) for both in zip(self.lengths, self.matched, strict=True)]


@dataclass(frozen=True)
class RoundResult:
    outcomes: list[Outcome]
    width: int  # tokens proposed for the row with most; the pass was over one more for every row
    draft_ms: float
    verify_ms: float
    absorbed: int  # earlier tokens that drafters caught up on
    asked: list[int]  # how deep each row's proposal was to go
    proposers: list[Resident]  # of whom each row's proposal was; n-grams, where a drafter's was beside theirs
    by_match: dict[int, int]  # of such rows, how many tokens were accepted of what the match alone had named


def read_prompt(target: Target, slots: Slots, slot: int, row: Row, most: int) -> Tensor | None:
    """Read up to `most` further prompt tokens into a slot; after the last one its logits [1, 1, V]."""
    start = row.target_length
    part = row.sequence[start : start + most]
    place = slots.begin([start], len(part), first=slot)
    logits: Tensor = target.model(
        input_ids=torch.tensor([part], device=target.device),
        position_ids=place.positions,
        attention_mask=place.mask,
        cache=slots,
        use_cache=True,
        logits_to_keep=1,
    ).logits
    row.target_length = start + len(part)
    return logits if row.target_length == len(row.sequence) else None


def first_token(target: Target, row: Row, logits: Tensor) -> Outcome:
    """What follows a prompt: a round without a proposal, on the logits [1, 1, V] after the prompt."""
    return accept([row], [0], nothing(target, 1), logits)[0]


def verify(target: Target, slots: Slots, rows: Sequence[Row], proposal: Proposal, branches: Branches | None) -> Tensor:
    """The target's logits [B, n + 1, V] after each row's last token and after each proposed token.

    `branches`: how those of trees hang together. Fewer logits come back where the pass is pruned on its way.
    """
    last = torch.tensor([[r.sequence[-1]] for r in rows], device=target.device)
    tokens = torch.cat([last, proposal.tokens], dim=1)
    place = slots.begin([r.target_length for r in rows], tokens.shape[1], branches=branches)
    logits: Tensor = target.model(
        input_ids=tokens, position_ids=place.positions, attention_mask=place.mask, cache=slots, use_cache=True
    ).logits
    return logits


def branches_of(roots: list[int], parents: Tensor) -> Branches:
    """How a verification's n + 1 tokens hang together: the last committed token, and the tree [B, n] after it."""
    count, nodes = parents.shape
    edges = torch.eye(nodes + 1, device=parents.device).repeat(count, 1, 1)
    edges[:, 1:].scatter_(2, parents[..., None] + 1, 1.0)
    steps = 1
    while steps < nodes:  # from one step up the tree to all of them
        edges, steps = (edges @ edges).clamp_max(1.0), 2 * steps
    sees = edges > 0
    return Branches(roots, sees.sum(-1) - 1, sees)


def play(
    target: Target,
    slots: Slots,
    residents: Sequence[Resident],
    rows: list[Row],
    plan: Plan,
    ngrams: Resident | None = None,
) -> RoundResult:
    """Propose, verify, accept, once, and set every row's memory to what was accepted. `residents`: each row's."""
    began = perf_counter()
    followed = followers(residents, plan.depths)
    asks = _asks(residents, rows, plan, ngrams)
    proposal, absorbed, matched = propose(target, asks, rows)
    asked = _deepest(asks, len(rows))
    drafted = perf_counter()
    starts = [row.target_length for row in rows]
    branches = None if proposal.parents is None else branches_of(starts, proposal.parents)
    proposers = [ngrams if ngrams and k else own for own, k in zip(residents, plan.matched, strict=True)]
    pruning = pruning_of(proposers, rows, proposal, branches, plan.shape)
    pruned = nullcontext() if pruning is None else pruning.in_pass(target, slots)
    with pruned, reading(target, slots, [resident for resident, _ in followed]) as reads:
        logits = verify(target, slots, rows, proposal, branches)
    outcomes = accept(rows, asked, proposal if pruning is None else pruning.left(), logits)
    for resident, places in followed:
        reads.tell(resident, [_shown(rows[place], place, outcomes[place]) for place in places])
    outcomes = outcomes if pruning is None else pruning.restored(outcomes)
    settle(slots, {ask.place: ask.of for ask in asks if ask.of is not ngrams}, rows, outcomes, proposal)
    width = proposal.tokens.shape[1]
    draft_ms, verify_ms = (drafted - began) * 1e3, (perf_counter() - drafted) * 1e3
    by_match = {at: sum(node < count for node in outcomes[at].path) for at, count in matched.items()}
    return RoundResult(outcomes, width, draft_ms, verify_ms, absorbed, asked, proposers, by_match)


def _asks(residents: Sequence[Resident], rows: Sequence[Row], plan: Plan, ngrams: Resident | None) -> list[Ask]:
    """Who is asked for what: n-grams for rows with a match, and every drafter that is ready for its own rows."""
    own = [
        Ask(place, resident, plan.shape, length)
        for place, (row, resident, length) in enumerate(zip(rows, residents, plan.lengths, strict=True))
        if length > 0 and ready(row, resident)
    ]
    matched = [Ask(place, ngrams, plan.lookup, k) for place, k in enumerate(plan.matched) if k > 0 and ngrams]
    return [*matched, *own]


def _deepest(asks: Sequence[Ask], rows: int) -> list[int]:
    """How deep each row's proposal is to go, of all that are asked."""
    asked = [0] * rows
    for ask in asks:
        asked[ask.place] = max(asked[ask.place], ask.depth)
    return asked


def _shown(row: Row, place: int, outcome: Outcome) -> Shown:
    """A row of a verification: its last token and the accepted ones, and the token after each."""
    return Shown(row, place, row.target_length, [0, *(node + 1 for node in outcome.path)], outcome.tokens, place)


def settle(
    slots: Slots,
    drafted: Mapping[int, Resident],
    rows: Sequence[Row],
    outcomes: Sequence[Outcome],
    proposal: Proposal,
) -> None:
    """Set every row's memory to what was accepted: of a tree, its path is moved to where a chain would stand.

    drafted: by place, the drafters that went on from their proposals.
    """
    kept = None if proposal.kept is None else proposal.kept.tolist()
    moved: dict[Slots, list[tuple[int, int, int]]] = {slots: []}
    for slot, (row, outcome) in enumerate(zip(rows, outcomes, strict=True)):
        known, path = len(row.sequence), outcome.path
        moved[slots] += [(slot, known + node, known + at) for at, node in enumerate(path) if node != at]
        row.target_length = known + outcome.accepted
        if (
            not outcome.proposed
            or row.drafter_memory is None
            or drafted.get(slot) is not row.resident
            or row.state is not None
        ):
            continue
        if kept is None:
            row.drafter_length = known + min(outcome.accepted, outcome.proposed - 1)
        else:
            fed = list(takewhile(lambda place: place >= 0, (kept[slot][node] for node in path)))
            part = moved.setdefault(row.drafter_memory, [])
            part += [(slot, known + place, known + at) for at, place in enumerate(fed) if place != at]
            row.drafter_length = known + len(fed)
    for memory, part in moved.items():
        memory.keep(part)
