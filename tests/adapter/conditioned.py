"""Drafters that are conditioned on the tiny target's hidden states, and what a server or the worker gives them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from adapter.distil import Lesson
from adapter.drafters.kinds import Sizes, first_version
from adapter.drafters.learnt import LearntDrafter
from adapter.drafters.protocol import DraftRow, FollowRow
from adapter.drafters.shared import Shared
from adapter.policy import Policy
from adapter.rescore import rescore
from adapter.sampling import Sampler
from adapter.taps import Taps
from adapter.target import Target
from service.engine import attention
from service.engine.slots import Slots
from storage.records import FeedbackRecord

CONDITIONED = ("medusa", "mtp", "eagle", "streaming")
WHOLE = 10_000


def first(target: Target, kind: str, depths: int = 3, tokens: Tensor | None = None) -> LearntDrafter:
    """Version 1 of a kind, over every token by default."""
    known = torch.arange(target.vocab_size) if tokens is None else tokens
    shared, sizes = Shared(target.embedding, target.files), Sizes(layers=2, depths=depths)
    return first_version(kind, target.model, shared, known, sizes)


@torch.no_grad()
def shaken(drafter: LearntDrafter, scale: float = 0.05) -> LearntDrafter:
    """With weights that are not as they started, so that nothing is zero or the same at every depth."""
    generator = torch.Generator().manual_seed(3)
    for weight in drafter.trainable():
        weight += scale * torch.randn(weight.shape, generator=generator)
    return drafter


@torch.no_grad()
def hidden_of(target: Target, drafter: LearntDrafter, tokens: Sequence[int]) -> Tensor:
    """The target's hidden states [n, F] that the drafter is conditioned on."""
    taps = Taps(target.model, drafter.taps)
    with taps.reading():
        target.model(input_ids=torch.tensor([list(tokens)]))
    return taps.hidden()[0]


def read_again(
    target: Target, drafter: LearntDrafter, records: Sequence[FeedbackRecord], max_context: int = WHOLE, top_k: int = 64
) -> Lesson:
    """The records as the trainer has them, with hidden states."""
    read = list(rescore(target, records, drafter.taps, top_k, max_context=max_context))
    hidden = {r.record.record_id: r.hidden for r in read if r.hidden is not None}
    return Lesson([r.record for r in read], hidden=hidden)


class Server:
    """The part of a server that a conditioned drafter sees: each row's target pass followed, its state kept."""

    def __init__(self, target: Target, drafter: LearntDrafter, rows: int, capacity: int = 128) -> None:
        self._target, self._drafter = target, drafter
        if drafter.decoder is not None:
            attention.install(drafter.decoder)
        self.memory = None if drafter.decoder is None else Slots(drafter.decoder, rows, capacity)
        self._known = [0] * rows
        self._states: list[Tensor | None] = [None] * rows

    @torch.inference_mode()
    def follow(self, sequences: Sequence[Sequence[int]], ends: Sequence[int] | None = None) -> None:
        """The target has read all but each row's last token, or up to `ends`."""
        ends = ends or [len(sequence) - 1 for sequence in sequences]
        parts = [
            hidden_of(self._target, self._drafter, sequence[:end])[known:]
            for sequence, known, end in zip(sequences, self._known, ends, strict=True)
        ]
        rows = [
            FollowRow(known, list(sequence[known + 1 : end + 1]), state)
            for sequence, known, end, state in zip(sequences, self._known, ends, self._states, strict=True)
        ]
        hidden = torch.nn.utils.rnn.pad_sequence(parts, batch_first=True)
        self._states = list(self._drafter.follow(self.memory, rows, hidden))
        self._known = list(ends)

    def rows(self, sequences: Sequence[Sequence[int]], length: int, samplers: Sequence[Sampler] = ()) -> list[DraftRow]:
        """The rows as they are handed to `propose`; greedy by default."""
        return [
            DraftRow([sequence[-1]], known, length, sampler, state)
            for sequence, known, sampler, state in zip(
                sequences, self._known, samplers or [greedy(s) for s in sequences], self._states, strict=True
            )
        ]


def greedy(prompt: Sequence[int]) -> Sampler:
    return Sampler(Policy(0.0), list(prompt), [])
