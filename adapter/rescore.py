"""Re-scoring: the target reads logged requests again, and says of every wanted position what it thought of it.

What the engine logs is bounded by what serving can afford: rows where a proposal was refused, and no hidden state.
Read again in the worker, a record has the target's row wherever something can be learnt, of sampled requests too, and
the hidden states of the text for drafters that are conditioned on them (`adapter/taps`). Rows have the logged ones'
format and meaning, so all that reads records reads these.

Many records go through one pass, those of like length together; a pass has a bounded number of tokens, and only the
wanted positions go through the head.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache

from adapter.batch import Positions
from adapter.taps import Taps
from adapter.target import Target
from adapter.teacher import teacher_rows
from storage.config import setting
from storage.records import FeedbackRecord, TeacherRows

Places = npt.NDArray[np.int64]
WHOLE = 2**31  # tokens of a prompt: all of them


@dataclass(frozen=True)
class RescoreConfig:
    """What teaches, and what reading logged text again may take."""

    teacher: Literal["logged", "rescored", "engine"] = setting(
        "logged",
        "what a drafter learns from: `logged`, the rows that serving kept; `rescored`: the target is loaded in the "
        "trainer and scores the logged text again, at every position; or `engine`: the engine of REDRAFT_TEACHER_URL "
        "does, off-peak. A drafter that is conditioned on the target's hidden states always learns from `rescored`",
    )
    rescore_tokens: int = setting(1024, "tokens of one pass of re-scoring, padding included")
    rescore_top_k: int = setting(64, "target probabilities of a re-scored position")
    rescore_share: float = setting(
        0.5, "share of its time that the trainer computes while it re-scores; it sleeps the rest"
    )

    def __post_init__(self) -> None:
        if not 0 < self.rescore_share <= 1:
            raise ValueError(f"REDRAFT_RESCORE_SHARE={self.rescore_share}: use more than 0, at most 1")
        if min(self.rescore_tokens, self.rescore_top_k) < 1:
            raise ValueError("REDRAFT_RESCORE_TOKENS and REDRAFT_RESCORE_TOP_K: use 1 or more")


@dataclass(frozen=True)
class Rescored:
    """A record as the target reads it now."""

    record: FeedbackRecord  # its teacher rows are those of every wanted position
    hidden: Tensor | None  # bf16 [n, F] on the CPU, of the end of the prompt and the whole output; None without taps


@dataclass(frozen=True)
class Pace:
    """Bounds the share of the time that is spent at work: after each piece of it comes a sleep as long as it takes."""

    share: float = 1.0
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep

    @contextmanager
    def work(self) -> Iterator[None]:
        began = self.clock()
        yield
        rest = (self.clock() - began) * (1 / self.share - 1)
        if rest > 0:
            self.sleep(rest)


def rescore(
    target: Target,
    records: Sequence[FeedbackRecord],
    taps: tuple[int, ...] = (),
    top_k: int = 64,
    rows: Positions = "verified",
    *,
    max_context: int = 32,
    batch_tokens: int = 1024,
    pace: Pace = Pace(),
) -> Iterator[Rescored]:
    """Each usable record with the target's rows (raw logits, temperature 1) at its wanted output positions.

    `rejected` positions are those where a proposal was refused, `verified` ones all but the first, which no drafter
    proposes for. Hidden states are of the last `max_context` tokens of the prompt, one at least, and of the output.
    What may not be learnt from, has no such position, or is longer than the target's context is left out. The order is
    by length, and the same for the same records. No more than a pass of `batch_tokens` is in memory at a time.
    """
    scorer = _Scorer(target, Taps(target.model, taps), top_k, rows, max_context, batch_tokens)
    for group in _alike([record for record in records if scorer.takes(record)], batch_tokens):
        with pace.work():
            found = scorer.score(group)
        yield from found


def hidden_states(
    target: Target, records: Sequence[FeedbackRecord], taps: tuple[int, ...], max_context: int = WHOLE
) -> dict[str, Tensor]:
    """The target's states [n, F] of the usable records, by record id; empty, and nothing is read, without taps."""
    read = rescore(target, records, taps, max_context=max_context) if taps else ()
    return {one.record.record_id: one.hidden for one in read if one.hidden is not None}


def wanted(record: FeedbackRecord, rows: Positions) -> Places:
    """The output positions of the record that rows are asked for, ascending."""
    if rows == "verified":
        return np.arange(1, len(record.output))
    return np.array([r.start + r.accepted for r in record.rounds if r.accepted < r.proposed], dtype=np.int64)


@dataclass(frozen=True)
class _Piece:
    """What one pass of the target gave for a group of records."""

    rows: list[TeacherRows]  # of each record, at those of its wanted positions that lie in the piece
    hidden: Tensor | None  # bf16 [B, n, F] on the CPU


@dataclass(frozen=True)
class _Scorer:
    target: Target
    taps: Taps
    top_k: int
    rows: Positions
    max_context: int
    batch_tokens: int

    def takes(self, record: FeedbackRecord) -> bool:
        usable = record.train and record.lossless and not record.structured
        usable = usable and _length(record) <= self.target.context
        return usable and len(wanted(record, self.rows)) > 0

    def score(self, group: Sequence[FeedbackRecord]) -> list[Rescored]:
        """Records of like length: in one pass, unless a single record is longer than a pass may be."""
        pieces = list(self._pieces(group))
        rows = [_joined([piece.rows[i] for piece in pieces]) for i in range(len(group))]
        states = [piece.hidden for piece in pieces if piece.hidden is not None]
        hidden = torch.cat(states, dim=1) if states else None
        return [
            Rescored(msgspec.structs.replace(record, teacher=rows[i]), self._of_record(record, hidden, i))
            for i, record in enumerate(group)
        ]

    @torch.no_grad()
    def _pieces(self, group: Sequence[FeedbackRecord]) -> Iterator[_Piece]:
        """The group's tokens from left to right; pieces after the first remember those before."""
        tokens = _padded(group)
        step = max(1, self.batch_tokens // len(group))
        memory = DynamicCache() if tokens.shape[1] > step else None
        for start in range(0, tokens.shape[1], step):
            yield self._piece(group, tokens[:, start : start + step], start, memory)

    def _piece(self, group: Sequence[FeedbackRecord], tokens: Tensor, start: int, memory: Cache | None) -> _Piece:
        """One pass over `tokens` [B, n], which stand at the positions from `start` on."""
        width = tokens.shape[1]
        at = [_before(record, wanted(record, self.rows)) - start for record in group]
        at = [places[(places >= 0) & (places < width)] for places in at]
        with self.taps.reading():
            logits = self._logits(tokens, at, start, memory)
        ends = np.cumsum([len(places) for places in at]).tolist()
        rows = [
            teacher_rows(_after(record, places + start).tolist(), logits[end - len(places) : end], self.top_k)
            for record, places, end in zip(group, at, ends, strict=True)
        ]
        return _Piece(rows, self.taps.hidden().to("cpu", torch.bfloat16) if self.taps.taps else None)

    def _logits(self, tokens: Tensor, at: Sequence[Places], start: int, memory: Cache | None) -> Tensor:
        """The logits [R, V] at each row's indices; the head sees no other token, as it is what costs most memory.

        The states are picked on their way into the head, so whatever an architecture does to logits is done.
        """
        width, device = tokens.shape[1], self.target.device
        flat = torch.from_numpy(np.concatenate([places + i * width for i, places in enumerate(at)])).to(device)
        picked = flat if len(flat) else flat.new_zeros(1)  # a head is not to be asked for nothing

        def pick(head: nn.Module, given: tuple[Tensor]) -> Tensor:
            return given[0].flatten(0, 1).index_select(0, picked)[None]

        positions = torch.arange(start, start + width, device=device)[None]
        hook = self.target.model.get_output_embeddings().register_forward_pre_hook(pick)
        try:
            out = self.target.model(
                input_ids=tokens.to(device), position_ids=positions, cache=memory, use_cache=memory is not None
            )
        finally:
            hook.remove()
        logits: Tensor = out.logits[0, : len(flat)]
        return logits

    def _of_record(self, record: FeedbackRecord, hidden: Tensor | None, row: int) -> Tensor | None:
        """The states of a record's last prompt tokens and output, from its group's [B, n, F]; a copy."""
        if hidden is None:
            return None
        first = len(record.prompt) - min(max(1, self.max_context), len(record.prompt))
        return hidden[row, first : _length(record)].clone()


def _alike(records: Sequence[FeedbackRecord], batch_tokens: int) -> Iterator[list[FeedbackRecord]]:
    """Groups of like length, the shortest first, each of at most `batch_tokens` when padded, or of one record."""
    group: list[FeedbackRecord] = []
    for record in sorted(records, key=lambda r: (_length(r), r.record_id)):
        if group and _length(record) * (len(group) + 1) > batch_tokens:
            yield group
            group = []
        group.append(record)
    if group:
        yield group


def _padded(group: Sequence[FeedbackRecord]) -> Tensor:
    """Prompts and outputs [B, n], padded with token 0 on the right, where causal attention never looks."""
    tokens = torch.zeros(len(group), max(map(_length, group)), dtype=torch.int64)
    for i, record in enumerate(group):
        tokens[i, : _length(record)] = torch.from_numpy(np.concatenate([record.prompt, record.output]).astype(np.int64))
    return tokens


def _before(record: FeedbackRecord, positions: Places) -> Places:
    """Indices into prompt and output of the tokens *before* the output positions: there the target speaks of them."""
    return positions + len(record.prompt) - 1


def _after(record: FeedbackRecord, indices: Places) -> Places:
    """The output positions that the target speaks of at these indices."""
    return indices - len(record.prompt) + 1


def _joined(parts: Sequence[TeacherRows]) -> TeacherRows:
    """Rows behind one another, of positions that ascend."""
    columns = zip(*((p.positions, p.ids, p.log_probs, p.tail_log_mass) for p in parts), strict=True)
    return TeacherRows(parts[0].top_k, *map(b"".join, columns))


def _length(record: FeedbackRecord) -> int:
    return len(record.prompt) + len(record.output)
