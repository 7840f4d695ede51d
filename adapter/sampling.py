"""How tokens are chosen: one spelling for the target's choice and the drafter's, for a whole batch at once.

Three kinds of rows. Greedy: the argmax of the adjusted logits. Seeded: the argmax under common noise (adapter/seeded).
For both, a proposal is right where it names the target's own choice. Sampled: a draw, and the ratio test
(adapter/acceptance) with uniforms of the row's own. A fourth kind is lossy, and there only for requests that ask for
it: lenient rows, whose proposals are the drafter's best and need only be typical of the target (adapter/typical).
Python loops only over rows, and over positions only where a policy adjusts logits or a constraint holds.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from adapter.acceptance import Drawn, draw, matching_prefix, verify_chain
from adapter.policy import Policy
from adapter.processing import DraftVocabulary, History, favour, mask, penalise, probabilities
from adapter.seeded import CommonNoise
from adapter.typical import Typical, verify_typical_chain


class Constraint(Protocol):
    """What may follow, for structured output; it keeps its own place in the committed text."""

    def allowed(self, drafted: Sequence[int]) -> Tensor:
        """Bool [V] on the CPU: the tokens that may follow the committed text and then `drafted`.

        Anything, but no error, after a `drafted` that is not allowed itself: such positions are never reached.
        """

    def commit(self, tokens: Sequence[int]) -> None:
        """These tokens were committed."""


@dataclass(eq=False)
class Sampler:
    """How one request's tokens are chosen; `output` is the request's own list, which grows as it is decoded."""

    policy: Policy
    prompt: Sequence[int]
    output: list[int]
    generator: torch.Generator | None = None  # a sampled row's own; made where it is not given
    seed: int | None = None
    constraint: Constraint | None = None
    typical: Typical | None = None  # LOSSY: accept by this rule, and not as the target would draw
    history: History | None = field(init=False)  # only where the policy looks back
    noise: CommonNoise | None = field(init=False)
    refusal: float = field(init=False, default=0.0)  # how likely the last refusal was; 0: not known

    def __post_init__(self) -> None:
        self.history = History(self.prompt, self.output) if self.policy.penalises else None
        self.noise = None if self.policy.greedy or self.seed is None else CommonNoise(self.seed)
        if self.typical is not None and self.seed is not None:
            raise ValueError("a seeded text depends on no drafter, which typical acceptance cannot promise")
        if (self.sampled or self.lenient) and self.generator is None:
            self.generator = torch.Generator()
            self.generator.seed()

    @property
    def seeded(self) -> bool:
        return self.noise is not None

    @property
    def sampled(self) -> bool:
        return not self.policy.greedy and self.noise is None and self.typical is None

    @property
    def lenient(self) -> bool:
        """Whether proposals need only be typical; a greedy row's would have to be the target's choice all the same."""
        return not self.policy.greedy and self.typical is not None

    @property
    def adjusts(self) -> bool:
        """Whether the logits change before temperature."""
        return self.policy.adjusts or self.constraint is not None

    def uniforms(self, count: int) -> Tensor:
        """The next `count` numbers of the row's own generator, on the CPU."""
        return torch.rand(count, generator=self.generator, dtype=torch.float64)

    def commit(self, tokens: Sequence[int]) -> None:
        """Tell the constraint what was committed; `output` already holds it."""
        if self.constraint is not None:
            self.constraint.commit(tokens)


def sampled_rows(samplers: Sequence[Sampler]) -> list[int]:
    """The rows whose proposals carry q, in the order in which q has them."""
    return [i for i, sampler in enumerate(samplers) if sampler.sampled]


def lenient_rows(samplers: Sequence[Sampler]) -> list[int]:
    """The rows that typical acceptance decides on."""
    return [i for i, sampler in enumerate(samplers) if sampler.lenient]


def rules_of(samplers: Sequence[Sampler], rows: Sequence[int]) -> list[Typical]:
    return [rule for i in rows if (rule := samplers[i].typical) is not None]


def choose(
    samplers: Sequence[Sampler], logits: Tensor, drafted: Tensor, vocabulary: DraftVocabulary | None = None
) -> tuple[Tensor, Tensor | None]:
    """The drafter's next token a row from its logits [B, V_d]: draft ids [B], and q [S, V_d] of the S sampled rows.

    drafted [B, i] are the target ids proposed before it in this round. Without `vocabulary` V_d is V.
    """
    logits = _adjusted(samplers, logits[:, None], drafted, [drafted.shape[1]] * len(samplers), vocabulary)
    chosen = choices_of(samplers, logits, drafted.shape[1], vocabulary)[:, 0]
    rows = sampled_rows(samplers)
    if not rows:
        return chosen, None
    q = probabilities(_rows(logits, rows), [samplers[i].policy for i in rows])[:, 0]
    chosen[rows] = draw(q, uniforms_of(samplers, rows, 1, q.device)[:, 0])
    return chosen, q


def verify(
    samplers: Sequence[Sampler], lengths: Sequence[int], tokens: Tensor, drawn: Sequence[Drawn], logits: Tensor
) -> list[tuple[int, int]]:
    """The decision on chains tokens [B, k] under the target's logits [B, k + 1, V]: (accepted, next token) a row.

    What stands past a row's own length is padding. Sampled rows in none of `drawn` have chosen tokens, or none.
    """
    logits = _adjusted(samplers, logits, tokens, lengths, None)
    choices = choices_of(samplers, logits, 0, None)
    limit = torch.tensor(lengths, device=logits.device)
    accepted = torch.minimum(matching_prefix(tokens, choices[:, :-1]), limit)
    following = choices.gather(1, accepted[:, None])[:, 0]
    for part in parts_of(samplers, tokens, drawn):
        rows, k = list(part.rows), min(part.tokens.shape[1], max(lengths[i] for i in part.rows))
        p = probabilities(_rows(logits, rows)[:, : k + 1], [samplers[i].policy for i in rows])
        uniforms = uniforms_of(samplers, rows, k + 1, p.device)
        accepted[rows], following[rows], chances = verify_chain(p, part if k else None, limit[rows], uniforms)
        note_refusals([samplers[i] for i in rows], chances)
    if rows := lenient_rows(samplers):
        p = probabilities(_rows(logits, rows), [samplers[i].policy for i in rows])
        rules, uniforms = rules_of(samplers, rows), uniforms_of(samplers, rows, 1, p.device)
        accepted[rows], following[rows] = verify_typical_chain(p, tokens[rows], limit[rows], rules, uniforms[:, 0])
    decided = torch.stack([accepted, following]).tolist()
    return list(zip(*decided, strict=True))


def note_refusals(samplers: Sequence[Sampler], chances: Tensor) -> None:
    """Tell each row how likely it was that its proposal would be refused where it ended."""
    for sampler, chance in zip(samplers, chances.tolist(), strict=True):
        sampler.refusal = chance


def parts_of(samplers: Sequence[Sampler], tokens: Tensor, drawn: Sequence[Drawn]) -> list[Drawn]:
    """All sampled rows, in the parts in which they were proposed for; those in none of `drawn` are chosen ones."""
    known = {i for part in drawn for i in part.rows}
    chosen = [i for i in sampled_rows(samplers) if i not in known]
    return [*drawn, Drawn.chosen(tokens[chosen], chosen)] if chosen else list(drawn)


def choices_of(samplers: Sequence[Sampler], logits: Tensor, start: int, vocabulary: DraftVocabulary | None) -> Tensor:
    """What all but sampled rows choose at each position [B, n] of adjusted logits [B, n, V_d]; 0 for sampled rows.

    The first of the n positions stands `start` tokens after the row's output.
    """
    choices = torch.zeros(logits.shape[:2], dtype=torch.long, device=logits.device)
    best = [i for i, sampler in enumerate(samplers) if sampler.policy.greedy or sampler.lenient]
    if best:
        choices[best] = _rows(logits, best).max(-1).indices  # as argmax, but several times faster in bf16
    seeded = [i for i, sampler in enumerate(samplers) if sampler.seeded]
    if seeded:
        probs = probabilities(_rows(logits, seeded), [samplers[i].policy for i in seeded])
        noise = [noise_of(samplers[i], start, logits.shape[1], vocabulary, logits) for i in seeded]
        choices[seeded] = (probs / torch.stack(noise)).argmax(-1)
    return choices


def noise_of(sampler: Sampler, start: int, count: int, vocabulary: DraftVocabulary | None, logits: Tensor) -> Tensor:
    """The common noise [n, V_d] of a seeded row, from `start` tokens after its output on, for logits [..., V_d]."""
    assert sampler.noise is not None, "only seeded rows have common noise"
    first = len(sampler.output) + start
    size = logits.shape[-1] if vocabulary is None else len(vocabulary.to_draft)
    noise = sampler.noise.at(range(first, first + count), size, logits.device, len(sampler.output))
    return noise if vocabulary is None else noise[:, vocabulary.to_target]


def _adjusted(
    samplers: Sequence[Sampler],
    logits: Tensor,
    drafted: Tensor,
    lengths: Sequence[int],
    vocabulary: DraftVocabulary | None,
) -> Tensor:
    """Logits [B, n, V_d], changed where rows are constrained, biased or penalised.

    The last of the n positions stands after all of drafted [B, d]. Only the first lengths[i] drafted tokens of
    row i are looked at: what stands past them is padding, and those positions are never reached.
    """
    rows = [i for i, sampler in enumerate(samplers) if sampler.adjusts]
    if not rows:
        return logits
    logits = logits.to(torch.float32, copy=True)
    padding = drafted.shape[1]
    for i in rows:
        real = logits[i, : logits.shape[1] - padding + lengths[i]]
        adjust(samplers[i], real, drafted[i, : lengths[i]].tolist(), vocabulary)
    return logits


def adjust(sampler: Sampler, logits: Tensor, drafted: list[int], vocabulary: DraftVocabulary | None) -> None:
    """Change the logits [n, V_d] of one row in place; the last position stands after all of `drafted`."""
    if sampler.constraint is not None:
        first = len(drafted) + 1 - len(logits)
        allowed = [sampler.constraint.allowed(drafted[:end]) for end in range(first, len(drafted) + 1)]
        mask(logits, torch.stack(allowed).to(logits.device), vocabulary)
    if sampler.policy.logit_bias:
        favour(logits, sampler.policy.logit_bias, vocabulary)
    if sampler.history is not None:
        penalise(logits, sampler.policy, sampler.history, drafted, vocabulary)


def _rows(logits: Tensor, rows: list[int]) -> Tensor:
    """Some rows of the batch; all of them without a copy."""
    return logits if len(rows) == len(logits) else logits[rows]


def uniforms_of(samplers: Sequence[Sampler], rows: list[int], count: int, device: torch.device) -> Tensor:
    """Each row's own next `count` numbers: [S, count]."""
    return torch.stack([samplers[i].uniforms(count) for i in rows]).to(device)
