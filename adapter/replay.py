"""Replay: what a drafter would have done on logged requests, without a single call of the target.

Greedy requests: an accepted prefix equals the emitted text, so a teacher-forced pass gives the drafter's
choice at every position and depth, and from those every round at any k, exactly. Output index 0 came out of the
prefill, so rounds start at index 1, and proposals past the output's end are not counted.
Sampled requests: the drafter's overlap, at the first proposal, with the target's logged rows (temperature 1).
A drafter that is conditioned on the target's hidden states is given those that `adapter/rescore` read: of the output
and the end of the prompt, or of all of it, and then replay is what serving does.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from adapter.acceptance import Acceptance
from adapter.bootstrap import paired_gain
from adapter.drafters.learnt import LearntDrafter
from adapter.loss import drafter_rows, overlap, target_rows
from storage.decisions import Evaluation, WorkloadScore
from storage.records import FeedbackRecord

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
NONE_READ: Mapping[str, Tensor] = {}
HEAVIEST = 20.0  # largest weight of a rejected position: 1 / its rejection probability, bounded


@dataclass(frozen=True)
class Paired:
    """Parent and candidate on one request: sums over its positions, and the rounds of a greedy one."""

    workload: str
    policy: str  # "greedy" or "sampled"
    positions: int
    weight: float  # of the positions together; their number, unless they are rejections only
    parent: float  # weighted sum of acceptance probabilities
    candidate: float
    parent_rounds: tuple[tuple[int, int], ...]  # (proposed, accepted)
    candidate_rounds: tuple[tuple[int, int], ...]


def evaluate(
    candidate: LearntDrafter,
    parent: LearntDrafter,
    holdout: Sequence[FeedbackRecord],
    k: int,
    confidence: float = 0.95,
    seed: int = 0,
    hidden: Mapping[str, Tensor] = NONE_READ,
) -> Evaluation:
    """Both drafters on the same requests: see `scored`. `hidden` are the target's states by record id."""
    compared = (compare(candidate, parent, record, k, hidden.get(record.record_id)) for record in holdout)
    return scored([pair for pair in compared if pair is not None], k, confidence, seed)


def scored(pairs: Sequence[Paired], k: int, confidence: float = 0.95, seed: int = 0) -> Evaluation:
    """Paired requests by workload and policy, and over all workloads of the policy that most requests have.

    Greedy and sampled requests are never mixed: their figures are different measurements. Over all workloads each
    one counts by its requests, however long they are. The interval of each gain is a request-level bootstrap's:
    positions of one request are alike, so requests are drawn again, not positions. Lengths are of greedy requests
    (1.0 where there are none).
    """
    groups: dict[tuple[str, str], list[Paired]] = {}
    for pair in pairs:
        groups.setdefault((pair.workload, pair.policy), []).append(pair)
    scores = tuple(_score(*group, groups[group], confidence, seed) for group in sorted(groups))
    leading = max(("greedy", "sampled"), key=lambda policy: sum(pair.policy == policy for pair in pairs))
    chosen = [pair for (_, policy), found in sorted(groups.items()) if policy == leading for pair in _levelled(found)]
    return Evaluation(k, len(pairs), scores, _score("all", leading, chosen, confidence, seed))


def compare(
    candidate: LearntDrafter, parent: LearntDrafter, record: FeedbackRecord, k: int, hidden: Tensor | None = None
) -> Paired | None:
    """Both drafters on one request; None where nothing of it can be scored."""
    if not record.lossless or (hidden is None and (candidate.taps or parent.taps)):
        return None
    if record.greedy:  # a greedy answer under penalties, a bias or a grammar is not what the rows' own argmax says
        return _greedy(candidate, parent, record, k, hidden) if record.exact else None
    return _sampled(candidate, parent, record, hidden)


def matches(drafter: LearntDrafter, record: FeedbackRecord, hidden: Tensor | None = None) -> Bools:
    """Whether the drafter's first choice after the text before it is the emitted token, by output index: [T]."""
    first: Bools = matches_by_depth(drafter, record, 1, hidden)[0]
    return first


@torch.inference_mode()
def matches_by_depth(drafter: LearntDrafter, record: FeedbackRecord, k: int, hidden: Tensor | None = None) -> Bools:
    """Whether the emitted token is what the drafter would have proposed for it at each depth: [D, T], D at most k.

    At depth j by output index: in a proposal that began j tokens before, and was right so far. A language model of its
    own says the same at every depth; others may not go as deep as k.
    """
    output = torch.from_numpy(record.output.astype(np.int64))
    found = np.zeros((min(k, drafter.depths), len(output)), dtype=np.bool_)
    for depth, states in enumerate(_before_outputs(drafter, record, hidden, k)):
        chosen = drafter.logits(states[: len(output) - depth], depth).argmax(-1)
        found[depth, depth:] = (drafter.draft_to_target[chosen].cpu() == output[depth:]).numpy()
    return found if drafter.taps else np.broadcast_to(found, (k, len(output)))


@torch.inference_mode()
def overlaps(drafter: LearntDrafter, record: FeedbackRecord, hidden: Tensor | None = None) -> Floats:
    """sum(min(p, q)) at each of the record's teacher rows, where a proposal begins there: [R]."""
    positions, ids, log_probs, tail = record.teacher.arrays()
    states = next(_before_outputs(drafter, record, hidden, 1))
    rows = states[torch.from_numpy(positions.astype(np.int64))]
    draft_ids = drafter.target_to_draft.cpu()[torch.from_numpy(ids.astype(np.int64))]
    log_p = target_rows(torch.from_numpy(log_probs), torch.from_numpy(tail.copy()), draft_ids)
    log_q = drafter_rows(drafter.logits(rows).cpu(), draft_ids)
    return overlap(log_p, log_q).double().numpy()


def rounds(matched: Bools, k: int) -> list[tuple[int, int]]:
    """(proposed, accepted) of each round that greedy speculative decoding plays over an output.

    matched [D, T] as of `matches_by_depth`, then a proposal is at most D tokens deep; or [T] where depth is no matter.
    """
    by_depth = matched if matched.ndim == 2 else np.broadcast_to(matched, (k, len(matched)))
    played, start, (deepest, end) = [], 1, by_depth.shape
    while start < end:
        proposed = min(k, deepest, end - start)
        refused = np.flatnonzero(~by_depth[range(proposed), range(start, start + proposed)])
        accepted = int(refused[0]) if len(refused) else proposed
        played.append((proposed, accepted))
        start += accepted + 1
    return played


def _before_outputs(
    drafter: LearntDrafter, record: FeedbackRecord, hidden: Tensor | None, depth: int
) -> Iterator[Tensor]:
    """By depth, the state before each output token: [T, H]; those of the last `depth` tokens say nothing."""
    device = drafter.draft_to_target.device
    hidden = hidden if drafter.taps else None
    known = len(record.prompt) if hidden is None else len(hidden) - len(record.output)
    text = np.concatenate([record.prompt[-known:], record.output[:-1]]).astype(np.int64)
    states = None if hidden is None else hidden[None, : len(text)].to(device)
    for unrolled in drafter.unrolled(torch.from_numpy(text)[None].to(device), states, None, depth):
        yield unrolled[0, known - 1 :]


def _greedy(
    candidate: LearntDrafter, parent: LearntDrafter, record: FeedbackRecord, k: int, hidden: Tensor | None
) -> Paired | None:
    if len(record.output) < 2:
        return None
    ours, theirs = (matches_by_depth(drafter, record, k, hidden) for drafter in (candidate, parent))
    positions = len(record.output) - 1
    return Paired(
        workload=record.workload,
        policy="greedy",
        positions=positions,
        weight=float(positions),
        parent=float(theirs[0, 1:].sum()),
        candidate=float(ours[0, 1:].sum()),
        parent_rounds=tuple(rounds(theirs, k)),
        candidate_rounds=tuple(rounds(ours, k)),
    )


def _sampled(
    candidate: LearntDrafter, parent: LearntDrafter, record: FeedbackRecord, hidden: Tensor | None
) -> Paired | None:
    if not record.teacher.positions:
        return None
    ours, theirs = (overlaps(drafter, record, hidden) for drafter in (candidate, parent))
    weights = row_weights(record, theirs)
    return Paired(
        workload=record.workload,
        policy="sampled",
        positions=len(weights),
        weight=float(weights.sum()),
        parent=float(weights @ theirs),
        candidate=float(weights @ ours),
        parent_rounds=(),
        candidate_rounds=(),
    )


def row_weights(record: FeedbackRecord, parent: Floats) -> Floats:
    """How many positions each teacher row [R] stands for.

    Rows logged at rejections only are a biased sample: a position is in it with its rejection probability, so it
    stands for as many verified ones as one over that (Horvitz-Thompson). Unweighted, a parent would be judged by the
    positions where it did badly, and any other drafter would look better. The engine writes the probability down,
    which depends on the policy, on the version that proposed, and on the siblings of a tree; where it was not known, as
    of seeded requests and of most hosts, it is taken for that of a token drawn from the parent, 1 - overlap. Rows at
    tokens that were decoded plainly stand for all of those alike. Rows logged at every verified position count one
    each.
    """
    positions = record.teacher.arrays()[0]
    refused = np.isin(positions, [r.start + r.accepted for r in record.rounds if r.accepted < r.proposed])
    plain = np.setdiff1d(np.arange(len(record.output)), _in_rounds(record))
    rows_of_plain = np.isin(positions, plain)
    if not (refused | rows_of_plain).all():
        return np.ones(len(positions))
    each = len(plain) / max(1, int(rows_of_plain.sum()))
    chances = record.teacher.refusal_chances().astype(np.float64)
    refusal = np.where(chances > 0, chances, 1.0 - parent)
    return np.where(rows_of_plain, each, np.minimum(1.0 / np.maximum(refusal, 1e-9), HEAVIEST))


def _in_rounds(record: FeedbackRecord) -> npt.NDArray[np.int64]:
    """The output positions that rounds with a proposal committed, the next tokens among them."""
    spans = [np.arange(r.start, r.start + r.accepted + 1) for r in record.rounds]
    return np.concatenate([*spans, np.array([], dtype=np.int64)])


def _levelled(group: Sequence[Paired]) -> list[Paired]:
    """A workload's requests with weights that sum to their number, so that long answers count no more."""
    total = sum(pair.weight for pair in group)
    level = len(group) / total if total > 0 else 0.0
    return [replace(p, weight=p.weight * level, parent=p.parent * level, candidate=p.candidate * level) for p in group]


def _score(workload: str, policy: str, pairs: Sequence[Paired], confidence: float, seed: int) -> WorkloadScore:
    sums = np.array([(p.weight, p.parent, p.candidate) for p in pairs]).reshape(-1, 3)
    total = float(sums[:, 0].sum()) or 1.0
    low, high = paired_gain(sums, confidence, seed)
    parent, candidate = float(sums[:, 1].sum()) / total, float(sums[:, 2].sum()) / total
    return WorkloadScore(
        workload=workload,
        policy=policy,
        requests=len(pairs),
        positions=sum(p.positions for p in pairs),
        parent_probability=parent,
        candidate_probability=candidate,
        parent_length=Acceptance.of([r for p in pairs for r in p.parent_rounds]).length,
        candidate_length=Acceptance.of([r for p in pairs for r in p.candidate_rounds]).length,
        gain=candidate - parent,
        gain_low=low,
        gain_high=high,
    )
