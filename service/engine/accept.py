"""The decision on one round: what each row keeps of its proposal, what the target adds, what the adapter learns."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from adapter.drafters.protocol import Proposal
from adapter.sampling import verify
from adapter.tree_acceptance import verify_tree
from service.engine.generation import Row, TokenLogprobs

PLAIN_STRIDE = 8  # of plainly decoded positions above temperature 0, one in so many is logged


@dataclass(frozen=True)
class Outcome:
    """What a round did for one row.

    Of a tree, `proposed` is how deep the longest path goes through the node where the row's walk ended: more than
    what was accepted if and only if all children of that node were refused. The refused token is the best of them.
    """

    proposed: int
    accepted: int
    tokens: list[int]  # the accepted prefix and the next token
    rejected_token: int  # -1 where nothing was rejected
    rejected_q: float
    taught: Tensor | None  # the target's logits [V] before the next token, where they have something to teach
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # aligned with tokens; empty unless asked for
    path: list[int] = field(default_factory=list)  # the accepted tokens' places among the proposed ones
    ranks: list[tuple[int, int]] = field(default_factory=list)  # as `Decided` has them
    refusal: float = 0.0  # how likely it was that this would be refused; 0 where that is not known


@dataclass(frozen=True)
class Decided:
    """The decision on one row: the accepted tokens' places, the next token, and what was refused."""

    path: list[int]
    following: int
    proposed: int
    refused: int = -1  # place of the best token that was refused; -1 for none
    ranks: list[tuple[int, int]] = field(
        default_factory=list
    )  # by depth: children tried, the accepted one's rank or -1

    @property
    def end(self) -> int:
        """Which of the pass's logits the next token comes from."""
        return self.path[-1] + 1 if self.path else 0


def accept(rows: list[Row], lengths: list[int], proposal: Proposal, logits: Tensor) -> list[Outcome]:
    """Decide on every row by the target's logits [B, n + 1, V].

    Proposals past a row's own draft length are padding, and are not looked at. The token after a prefill is a
    round without a proposal.
    """
    tokens = proposal.tokens.tolist()
    decided = (
        _trees(rows, proposal, logits) if proposal.parents is not None else _chains(rows, lengths, proposal, logits)
    )
    committed = [[*(tokens[i][node] for node in d.path), d.following] for i, d in enumerate(decided)]
    taught = _taught(rows, decided, logits)
    logprobs = _logprobs(rows, committed, decided, logits)
    q = {row: taken for part in proposal.drawn for row, taken in zip(part.rows, part.taken.tolist(), strict=True)}
    refused = [_refused(tokens[i], d.refused, q.get(i)) for i, d in enumerate(decided)]
    return [
        Outcome(
            d.proposed,
            len(d.path),
            committed[i],
            *refused[i],
            taught.get(i),
            logprobs.get(i, []),
            d.path,
            d.ranks,
            rows[i].sampler.refusal if rows[i].sampler.sampled and d.refused >= 0 else 0.0,
        )
        for i, d in enumerate(decided)
    ]


def _chains(rows: list[Row], lengths: list[int], proposal: Proposal, logits: Tensor) -> list[Decided]:
    lengths = [min(k, proposal.tokens.shape[1]) for k in proposal.lengths or lengths]
    decided = verify([row.sampler for row in rows], lengths, proposal.tokens, proposal.drawn, logits)
    return [
        Decided(
            list(range(accepted)),
            following,
            k,
            accepted if accepted < k else -1,
            [(1, 0)] * accepted + [(1, -1)] * (accepted < k),
        )
        for k, (accepted, following) in zip(lengths, decided, strict=True)
    ]


def _trees(rows: list[Row], proposal: Proposal, logits: Tensor) -> list[Decided]:
    assert proposal.parents is not None, "chains have no parents"
    assert proposal.lengths is not None, "a tree says how large it is"
    samplers, lengths = [row.sampler for row in rows], proposal.lengths
    decided = verify_tree(samplers, lengths, proposal.tokens, proposal.parents, proposal.drawn, logits)
    parents = proposal.parents.tolist()
    return [_of_tree(path, following, parents[i][: lengths[i]]) for i, (path, following) in enumerate(decided)]


def _of_tree(path: list[int], following: int, parents: list[int]) -> Decided:
    end = path[-1] if path else -1
    below = {end: 0}  # by node under the end of the walk, how far
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(parents):
        children.setdefault(parent, []).append(node)
        if parent in below:
            below[node] = below[parent] + 1
    ranks = [(len(children[parents[node]]), children[parents[node]].index(node)) for node in path]
    refused = children.get(end, [])
    if refused:
        ranks.append((len(refused), -1))
    return Decided(path, following, len(path) + max(below.values()), refused[0] if refused else -1, ranks)


def _refused(proposed: list[int], place: int, q: list[float] | None) -> tuple[int, float]:
    """The token that was refused, -1 for none, and its q: 1.0 where it was not drawn but chosen."""
    if place < 0:
        return -1, 0.0
    return proposed[place], 1.0 if q is None else q[place]


def _taught(rows: list[Row], decided: list[Decided], logits: Tensor) -> dict[int, Tensor]:
    """The target's logits [V] where a row has something to teach, by row: one gather for the whole batch.

    That is its rejection position; and of a row above temperature 0 that is decoded plainly some positions, since
    there the emitted token alone does not tell the target's distribution. What is lossy teaches nothing.
    """
    taught = [i for i, row in enumerate(rows) if row.generation.trains and _teaches(row, decided[i])]
    if not taught:
        return {}
    at = torch.tensor([decided[i].end for i in taught], device=logits.device)
    return dict(zip(taught, logits[torch.tensor(taught, device=logits.device), at], strict=True))


def _teaches(row: Row, decided: Decided) -> bool:
    if decided.proposed:
        return decided.refused >= 0
    return not row.sampler.policy.greedy and len(row.generation.output_ids) % PLAIN_STRIDE == 1


def _logprobs(
    rows: list[Row], committed: Sequence[Sequence[int]], decided: Sequence[Decided], logits: Tensor
) -> dict[int, list[TokenLogprobs]]:
    """The target's log-probabilities of what the rows that asked commit, by row: one gather for the whole batch."""
    asked = {i: row.generation.logprobs for i, row in enumerate(rows) if row.generation.logprobs is not None}
    places = [
        (i, at, token)
        for i in asked
        for at, token in zip([0, *(node + 1 for node in decided[i].path)], committed[i], strict=True)
    ]
    if not places:
        return {}
    row, at, token = (torch.tensor(column, device=logits.device) for column in zip(*places, strict=True))
    log_probs = logits[row, at].float().log_softmax(-1)
    own = log_probs.gather(1, token[:, None])[:, 0].tolist()
    best = log_probs.topk(min(max(asked.values()), log_probs.shape[-1]), dim=-1)
    pairs = [list(zip(*both, strict=True)) for both in zip(best.indices.tolist(), best.values.tolist(), strict=True)]
    found: dict[int, list[TokenLogprobs]] = {i: [] for i in asked}
    for (i, _, chosen), logprob, top in zip(places, own, pairs, strict=True):
        found[i].append(TokenLogprobs(chosen, logprob, tuple(top[: asked[i]])))
    return found
