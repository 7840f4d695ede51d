"""A tree that loses its unlikely branches in the middle of the target's pass (arXiv 2402.11131, 2.3).

A drafter with an early exit says after some layers how likely each node is, given the text before it. The best go on;
of the others nothing is computed any more, neither in the last layers nor in the head, and the round is decided as if
they had never been proposed. So whatever the exit says, the text is the target's: it changes what is verified alone.

That holds where children are the drafter's best choices. Children of a sampled row are drawn, and to drop one because
of which token it is would bias the text; a round with such rows is not pruned.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn

from adapter.drafters.protocol import Branches, EarlyExit, Proposal, Shape
from adapter.target import Target
from service.engine.accept import Outcome
from service.engine.generation import Row
from service.engine.residents import Resident
from service.engine.slots import Slots, rows_of

NEVER = float("-inf")
NARROWED = {"attention_mask", "position_ids", "position_embeddings"}  # of what a layer is told, what is by token
TIE = 1e-9  # by which a node stands behind one that was found before: never before its own parent


class Pruning:
    """Of one pass over trees: which nodes go on. `kept` [B, m + 1] are places in it, that of the last token first."""

    def __init__(self, proposal: Proposal, exits: EarlyExit, sees: Tensor, most: int) -> None:
        """`sees` [B, n + 1, n + 1]: the ancestors of each node and itself, as verification has them."""
        assert proposal.parents is not None, "only trees have branches"
        assert proposal.lengths is not None, "a tree says how large it is"
        self._proposal, self._parents, self._exits = proposal, proposal.parents, exits
        self._lengths = torch.tensor(list(proposal.lengths), device=proposal.tokens.device)
        self._sees, self._most = sees, most
        self._thread = get_ident()
        self.kept = torch.empty(0, dtype=torch.long)
        self._known: dict[int, tuple[Any, Any]] = {}  # by identity: what layers were told, and what is left of it

    @contextmanager
    def in_pass(self, target: Target, slots: Slots) -> Iterator[None]:
        """Drop the others in the pass of this block."""
        self._thread = get_ident()
        with ExitStack() as hooks:
            for at, layer in enumerate(target.model.get_decoder().layers[self._exits.layer :]):
                hook = partial(self._narrow, slots, at == 0)
                hooks.callback(layer.register_forward_pre_hook(hook, with_kwargs=True).remove)
            yield

    def left(self) -> Proposal:
        """The proposal of the nodes that went on, numbered anew."""
        nodes = self.kept[:, 1:] - 1
        count = self._parents.shape[1]
        number = torch.full((len(nodes), count), -1, device=nodes.device)
        number.scatter_(1, nodes, torch.arange(nodes.shape[1], device=nodes.device).expand_as(nodes))
        above = self._parents.gather(1, nodes)
        parents = torch.where(above < 0, -1, number.gather(1, above.clamp_min(0)))
        real = (nodes < self._lengths[:, None]).sum(1).tolist()
        places = None if self._proposal.kept is None else self._proposal.kept.gather(1, nodes)
        return Proposal(self._proposal.tokens.gather(1, nodes), (), parents, real, places)

    def restored(self, outcomes: Sequence[Outcome]) -> list[Outcome]:
        """The same outcomes with the nodes' numbers in the whole tree; which rank was accepted is not known of it."""
        nodes = (self.kept[:, 1:] - 1).tolist()
        return [
            replace(outcome, path=[nodes[i][node] for node in outcome.path], ranks=[])
            for i, outcome in enumerate(outcomes)
        ]

    def _narrow(
        self, slots: Slots, first: bool, module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Before a layer: its input, and what it is told of the pass, without what does not go on."""
        if get_ident() != self._thread:
            return None
        if first:
            states = given[0] if given else named["hidden_states"]
            self.kept, self._known = self._best(states), {}
            slots.narrow(self.kept)
            states = _rows(states, self.kept)
            given, named = ((states, *given[1:]), named) if given else (given, {**named, "hidden_states": states})
        return given, {name: self._told(name, value) for name, value in named.items()}

    def _told(self, name: str, value: Any) -> Any:
        """Made once for all the layers that are told the same."""
        if name not in NARROWED:
            return value
        if id(value) not in self._known:
            self._known[id(value)] = value, self._of_kept(name, value)
        return self._known[id(value)][1]

    def _of_kept(self, name: str, value: Any) -> Any:
        if name == "attention_mask":
            return rows_of(value, self.kept)
        if name == "position_ids":
            return value.expand(len(self.kept), -1).gather(1, self.kept)
        return tuple(_rows(part.expand(len(self.kept), -1, -1), self.kept) for part in value)

    def _best(self, states: Tensor) -> Tensor:
        """The last token, and the nodes of the highest products of probabilities on the way to them."""
        inner, at = torch.unique(self._parents + 1, return_inverse=True)  # the places that have children
        said = self._exits.log_probs(states[:, inner], self._proposal.tokens)
        own = said.gather(1, at[:, None])[:, 0].double()
        own = torch.cat([own.new_zeros(len(own), 1), own], dim=1)
        value = torch.where(self._sees, own[:, None], 0.0).sum(-1)[:, 1:]
        order = torch.arange(value.shape[1], device=value.device)
        value = torch.where(order < self._lengths[:, None], value.clamp_min(-1e6), NEVER)
        best = (value - TIE * order).topk(min(self._most, value.shape[1]), dim=1).indices.sort(dim=1).values
        return torch.cat([best.new_zeros(len(best), 1), best + 1], dim=1)


def pruning_of(
    proposers: Sequence[Resident], rows: Sequence[Row], proposal: Proposal, tree: Branches | None, shape: Shape
) -> Pruning | None:
    """None where all of the proposal goes on."""
    if not shape.kept or tree is None or proposal.tokens.shape[1] <= shape.kept:
        return None
    drafters = {resident.drafter for resident in proposers}
    exits = next(iter(drafters)) if len(drafters) == 1 else None
    if exits is None or exits.early is None or any(row.sampler.sampled for row in rows):
        return None
    return Pruning(proposal, exits.early, tree.sees, shape.kept)


def _rows(states: Tensor, kept: Tensor) -> Tensor:
    return states.gather(1, kept[..., None].expand(-1, -1, states.shape[2]))
