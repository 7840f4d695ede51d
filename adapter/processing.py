"""Logits to probabilities, as a request's policy asks: the only spelling, for the target's p and the drafter's q.

In this order: constraint, logit bias, penalties (these three make *adjusted* logits, and greedy rows see them
too); then temperature, top-k, top-p, min-p. Position i of a proposal sees the tokens drafted before it as output.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from adapter.policy import Policy

WINDOWS = (128, 1024, 8192)  # likeliest tokens among which top-p is looked for, before all of V is sorted
COLDEST = 1e-5  # below, float32 cannot tell a temperature from greedy, and logits would overflow


@dataclass(frozen=True)
class DraftVocabulary:
    """The drafter's tokens among the target's: to_target [V_d] and its inverse to_draft [V], -1 where there is none."""

    to_target: Tensor
    to_draft: Tensor


class History:
    """The m different tokens of a request's prompt and output, and how often each stands in the output."""

    def __init__(self, prompt: Sequence[int], output: Sequence[int]) -> None:
        self._columns = {token: i for i, token in enumerate(dict.fromkeys(prompt))}
        self._counts = [0] * len(self._columns)
        self._output, self._counted = output, 0
        self._tensors: tuple[Tensor, Tensor] | None = None

    def tensors(self) -> tuple[Tensor, Tensor]:
        """Their ids [m] and counts [m], up to the output's present end."""
        if self._tensors is None or self._counted < len(self._output):
            for token in self._output[self._counted :]:
                self._counts.extend([0] * (token not in self._columns))
                self._counts[self._columns.setdefault(token, len(self._columns))] += 1
            self._counted = len(self._output)
            ids = torch.tensor(list(self._columns), dtype=torch.long)
            self._tensors = ids, torch.tensor(self._counts, dtype=torch.float32)
        return self._tensors

    def columns(self, tokens: Sequence[int]) -> dict[int, int]:
        """Where each of `tokens` stands among the m; new ones follow, from m on."""
        columns: dict[int, int] = {}
        new = len(self._columns)
        for token in dict.fromkeys(tokens):
            columns[token] = self._columns.get(token, new)
            new += columns[token] == new
        return columns


def mask(logits: Tensor, allowed: Tensor, vocabulary: DraftVocabulary | None) -> None:
    """Take away, in place, what is not allowed [n, V] from logits [n, V_d].

    Where the draft vocabulary holds no allowed token a position is left as it is: the target refuses whatever
    is proposed there.
    """
    if vocabulary is not None:
        allowed = allowed[:, vocabulary.to_target]
    logits.masked_fill_(~allowed & allowed.any(-1, keepdim=True), float("-inf"))


def favour(logits: Tensor, bias: Sequence[tuple[int, float]], vocabulary: DraftVocabulary | None) -> None:
    """Add a logit bias, in place, to logits [n, V_d]."""
    ids = torch.tensor([token for token, _ in bias], dtype=torch.long, device=logits.device)
    gains = torch.tensor([gain for _, gain in bias], device=logits.device)
    if vocabulary is not None:
        ids = vocabulary.to_draft[ids]
        ids, gains = ids[ids >= 0], gains[ids >= 0]
    logits[:, ids] += gains


def penalise(
    logits: Tensor, policy: Policy, history: History, drafted: Sequence[int], vocabulary: DraftVocabulary | None
) -> None:
    """Apply the penalties, in place, to logits [n, V_d]; the last of the n positions stands after all of `drafted`."""
    ids, counts, seen = (part.to(logits.device) for part in _seen(len(logits), history, drafted))
    if vocabulary is not None:
        ids = vocabulary.to_draft[ids]
        known = ids >= 0
        ids, counts, seen = ids[known], counts[:, known], seen[:, known]
    part = logits[:, ids]
    repeated = torch.where(part > 0, part / policy.repetition_penalty, part * policy.repetition_penalty)
    part = torch.where(seen, repeated, part)
    part -= policy.frequency_penalty * counts + policy.presence_penalty * (counts > 0)
    logits[:, ids] = part


def _seen(n: int, history: History, drafted: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """The m tokens that any position sees [m]; by position, how often as output [n, m], and whether at all [n, m]."""
    ids, counts = history.tensors()
    columns, old = history.columns(drafted), len(ids)
    ids = torch.cat([ids, torch.tensor([token for token, at in columns.items() if at >= old], dtype=torch.long)])
    table = torch.zeros(n, len(ids))
    table[:, :old] = counts
    seen = torch.zeros(n, len(ids), dtype=torch.bool)
    seen[:, :old] = True
    first = n - len(drafted)  # the first position that sees drafted[0]; every later token is seen one position later
    for at, token in enumerate(drafted):
        table[max(first + at, 0) :, columns[token]] += 1
        seen[max(first + at, 0) :, columns[token]] = True
    return ids, table, seen


def probabilities(logits: Tensor, policies: Sequence[Policy]) -> Tensor:
    """Adjusted logits [S, n, V] to probabilities [S, n, V] (float32); row i under policies[i]. None of them greedy."""
    temperature = _column([max(policy.temperature, COLDEST) for policy in policies], logits)
    probs = torch.softmax(logits.float() / temperature[:, None, None], -1)
    cut = [i for i, policy in enumerate(policies) if policy.truncates]
    if len(cut) == len(policies):
        return _truncated(probs, policies)
    if cut:
        probs[cut] = _truncated(probs[cut], [policies[i] for i in cut])
    return probs


def _truncated(probs: Tensor, policies: Sequence[Policy]) -> Tensor:
    """Zero, in place, what lies under each position's floor, and scale the rest to 1."""
    probs.masked_fill_(probs < _floors(probs, policies), 0.0)
    return probs.div_(probs.sum(-1, keepdim=True))


def _floors(probs: Tensor, policies: Sequence[Policy]) -> Tensor:
    """The least probability that each position [S, n, 1] keeps: tokens as likely as the last one kept are kept too.

    That makes the set independent of the order in which equals are sorted.
    """
    count, positions, size = probs.shape
    flat = probs.reshape(-1, size)
    k = _column([min(policy.top_k or size, size) for policy in policies], probs).repeat_interleave(positions)
    p = _column([policy.top_p for policy in policies], probs).repeat_interleave(positions)
    floors = torch.zeros(len(flat), device=probs.device)
    todo = torch.nonzero((k < size) | (p < 1.0))[:, 0]
    for window in (*(w for w in WINDOWS if w < size), size):
        if not len(todo):
            break
        part = flat if len(todo) == len(flat) else flat[todo]
        floor, settled = _floor_within(part, window, k[todo], p[todo])
        floors[todo[settled]] = floor[settled]
        todo = todo[~settled]
    if any(policy.min_p > 0.0 for policy in policies):
        least = _column([policy.min_p for policy in policies], probs).repeat_interleave(positions)
        floors = torch.maximum(floors, least * flat.amax(-1))
    return floors.view(count, positions, 1)


def _floor_within(probs: Tensor, window: int, k: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    """The floor of top-k and top-p [R] from the `window` likeliest tokens of probs [R, V], and where those suffice."""
    size = probs.shape[-1]
    ordered = probs.topk(window, dim=-1).values.double()
    ordered = ordered.masked_fill(torch.arange(window, device=probs.device) >= k[:, None], 0.0)
    reached = ordered.cumsum(-1)
    wanted = torch.where(p < 1.0, p * torch.where(k < size, reached[:, -1], 1.0), 2.0)  # 2: all that top-k leaves
    kept = ((reached - ordered < wanted[:, None]) & (ordered > 0)).sum(-1)
    floor = ordered.gather(-1, (kept - 1).clamp_min(0)[:, None])[:, 0]
    settled = (k <= window) | ((k == size) & (reached[:, -1] >= wanted))
    return floor.float(), settled


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=like.device)
