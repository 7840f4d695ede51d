"""How the children of a tree's nodes are chosen or drawn, for the rows of a batch together (see `tree`)."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from adapter.acceptance import Drawn, draw
from adapter.processing import DraftVocabulary, probabilities
from adapter.sampling import Sampler, adjust, noise_of, sampled_rows, uniforms_of

NEVER = float("-inf")
SURE = 0.95  # the most that a first drawn child is trusted to be accepted


@dataclass(frozen=True)
class Children:
    """Of w nodes a row, m each: target ids [B, w, m], and their cumulative log-probabilities, -inf for what is none."""

    tokens: Tensor
    values: Tensor


class Choosing:
    """Gives nodes their children, level by level, and keeps what the sampled rows' were drawn from."""

    def __init__(self, samplers: Sequence[Sampler], vocabulary: DraftVocabulary) -> None:
        self._samplers, self._vocabulary = samplers, vocabulary
        self._sampled = sampled_rows(samplers)
        self._sure = [i for i, sampler in enumerate(samplers) if not sampler.sampled]
        self._q: list[Tensor] = []
        self._source: list[Tensor] = []
        self._taken: list[Tensor] = []
        self.adjusts = any(sampler.adjusts for sampler in samplers)
        self.drawn_nodes = 0  # the most that any sampled row has

    def children(
        self,
        logits: Tensor,
        value: Tensor,
        most: int,
        paths: list[list[list[int]]],
        depth: int,
        slots: int,
        plan: Tensor | None,
    ) -> Children:
        """Up to `most` children of each node, by logits [B, w, V_d] after it and its own value [B, w].

        `slots` are the children that a sampled row gets at this level, all nodes together. A `plan`, bool [w, m],
        says instead which children there are, for all rows.
        """
        logits = self._adjusted(logits, paths)
        ids = torch.zeros(*logits.shape[:2], most, dtype=torch.long, device=logits.device)
        gains = torch.full(ids.shape, NEVER, device=logits.device)
        if self._sure:
            gains[self._sure], ids[self._sure] = self._best(logits, most, depth)
        if self._sampled:
            gains[self._sampled], ids[self._sampled] = self._drawn(logits, value, most, slots, plan)
        if plan is not None:
            gains = gains.masked_fill(~plan, NEVER)
        return Children(self._vocabulary.to_target[ids], value[..., None] + gains)

    def drawn(self, tokens: Tensor, order: Tensor) -> tuple[Drawn, ...]:
        """What the sampled rows' proposed tokens [B, n] were drawn from; `order` [B, n] are their places as found."""
        if not self._sampled:
            return ()
        order = order[self._sampled]
        source, taken = (torch.cat(parts, dim=1).gather(1, order) for parts in (self._source, self._taken))
        q = torch.cat(self._q, dim=1)
        return (Drawn(tokens[self._sampled], q, taken, self._vocabulary.to_target, tuple(self._sampled), source),)

    def _best(self, logits: Tensor, most: int, depth: int) -> tuple[Tensor, Tensor]:
        """Greedy and seeded rows: log-probabilities and draft ids [S, w, m] of the best choices."""
        kept = logits[self._sure].float()
        scores = kept.log_softmax(-1)
        for at, row in enumerate(self._sure):
            sampler = self._samplers[row]
            if sampler.seeded:  # as it will be chosen: by p / noise, put in relation to the other candidates
                probs = probabilities(kept[at : at + 1], [sampler.policy])[0]
                scores[at] = (probs / noise_of(sampler, depth, 1, self._vocabulary, logits)).log()
        best = scores.topk(most, dim=-1)
        gains = best.values
        for at, row in enumerate(self._sure):
            if self._samplers[row].seeded:
                gains[at] = gains[at].log_softmax(-1)
        return gains, best.indices

    def _drawn(
        self, logits: Tensor, value: Tensor, most: int, slots: int, plan: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Sampled rows: what each child is trusted with, and its draft id [S, w, m]; -inf where there is none."""
        rows = self._sampled
        q = probabilities(logits[rows], [self._samplers[i].policy for i in rows])
        trust = _trust(q, most)
        counts = _counts(value[rows][..., None] + trust, slots) if plan is None else plan.sum(-1).expand(len(rows), -1)
        width = q.shape[1]
        uniforms = uniforms_of(self._samplers, rows, width * most, q.device).view(len(rows), width, most)
        ids = torch.zeros(*q.shape[:2], most, dtype=torch.long, device=q.device)
        left = q.clone()
        for rank in range(most):
            real = (rank < counts) & (left.sum(-1) > 0)
            trust[..., rank].masked_fill_(~real, NEVER)
            drawn = draw(left.flatten(0, 1), uniforms[..., rank].flatten()).clamp_max(q.shape[-1] - 1)
            ids[..., rank] = drawn.view(len(rows), width)
            left.scatter_(2, ids[..., rank, None], 0.0)
        self._note(q, ids)
        self.drawn_nodes += int((trust > NEVER).flatten(1).sum(1).max())
        return trust, ids

    def _note(self, q: Tensor, ids: Tensor) -> None:
        before = sum(part.shape[1] for part in self._q)
        source = torch.arange(before, before + q.shape[1], device=q.device)[None, :, None].expand_as(ids)
        self._q.append(q)
        self._source.append(source.flatten(1))
        self._taken.append(q.gather(2, ids).flatten(1))

    def _adjusted(self, logits: Tensor, paths: list[list[list[int]]]) -> Tensor:
        """Logits [B, w, V_d], changed where rows are constrained, biased or penalised, each node by its own path."""
        if not self.adjusts:
            return logits
        logits = logits.to(torch.float32, copy=True)
        for i, sampler in enumerate(self._samplers):
            if sampler.adjusts:
                for at, path in enumerate(paths[i]):
                    adjust(sampler, logits[i, at : at + 1], path, self._vocabulary)
        return logits


def _trust(q: Tensor, most: int) -> Tensor:
    """How likely the children of a node are accepted, by rank, in logs [S, w, m]: known before they are drawn.

    A drafter that is sure of a token is mostly right; each further child comes to be tried only after those before.
    """
    sure = q.amax(-1).sqrt().clamp_max(SURE)[..., None]
    rank = torch.arange(most, device=q.device)
    return sure.log() + rank * torch.log1p(-sure)


def _counts(values: Tensor, slots: int) -> Tensor:
    """How many children each node [S, w] gets, where the best `slots` of all candidates [S, w, m] are taken."""
    flat = values.flatten(1)
    best = flat.topk(min(slots, flat.shape[1]), dim=1)
    taken = torch.zeros_like(flat).scatter_(1, best.indices, (best.values > NEVER).float())
    return taken.view(values.shape).sum(-1).long()
