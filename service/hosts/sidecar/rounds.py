"""Where an engine's rounds stood in the output, put together from what it says of each request.

vLLM gives, for each verify step that had a proposal, how many tokens were proposed and how many accepted. Step j
begins at s_j = 1 + sum of (a_i + 1) over the steps before it: the first token comes out of the prompt's own pass, and
each step adds its accepted tokens and one of the target's. Position s_j + a_j is a rejection position if and only if
a_j < d_j.

How sure that is depends on S = 1 + sum of (a_j + 1) against the length C of the output:
  exact            S == C
  exact_truncated  0 < S - C <= a_last: the end of text, a stop string or the limit cut the last step short. What it
                   committed was accepted, so it counts as a round that proposed and accepted just that.
  approx           anything else: a step without a proposal is in no list (the engine decoded plainly, computed a
                   request again, or a grammar dropped the proposal). Then the counts are right and the places are not.
A step without a proposal and a step cut short can cancel out. So where a step proposed less than the engine's k, which
says that steps without any are likely, or the output was bound to a form, it is `approx` whatever the sums say. A
proposal that is short because the request's limit leaves room for no more says nothing of the kind.

vLLM also lists a step that proposed nothing: where all of a prompt but its last token stands in the prefix cache, that
token's pass is padded to the width of the others, and counted as k proposed and none accepted. Cached are whole blocks,
so it takes a prompt of one token more than some blocks; with such a prompt, a first step of that kind makes the places
`approx`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

BLOCK = 16  # tokens of a block in vLLM's prefix cache, or some multiple of it

Grade = Literal["exact", "exact_truncated", "approx", "none"]


@dataclass(frozen=True)
class Steps:
    """A request's verify steps that had a proposal, in their order."""

    accepted: tuple[int, ...]
    drafted: tuple[int, ...]
    k: int  # the most that the engine proposes in a step

    def __post_init__(self) -> None:
        if len(self.accepted) != len(self.drafted):
            raise ValueError(f"{len(self.accepted)} steps accepted and {len(self.drafted)} proposed")
        if any(not 0 <= a <= d for a, d in zip(self.accepted, self.drafted, strict=True)):
            raise ValueError("a step accepted more than it proposed")


@dataclass(frozen=True)
class Place:
    """One round in the output."""

    start: int  # output index of its first proposed token
    proposed: int
    accepted: int

    @property
    def rejection(self) -> int | None:
        """The output index where the proposal was refused."""
        return self.start + self.accepted if self.accepted < self.proposed else None


@dataclass(frozen=True)
class Reconstruction:
    places: tuple[Place, ...]
    grade: Grade

    @property
    def exact(self) -> bool:
        """Whether its rejection positions are the engine's."""
        return self.grade in ("exact", "exact_truncated")

    @property
    def rejections(self) -> list[int]:
        return [place.rejection for place in self.places if place.rejection is not None]


def reconstruct(
    steps: Steps, length: int, bound: bool = False, limit: int | None = None, prompt: int = 0
) -> Reconstruction:
    """The rounds of a request of `length` output tokens, of which it allowed `limit`, after `prompt` tokens.

    `bound`: the output had to take a form.
    """
    if not steps.accepted:
        return Reconstruction((), "none")
    places = _laid_out(steps)
    unsure = bound or _short(places, steps.k, limit) or _padded(steps, prompt)
    grade: Grade = "approx" if unsure else _grade(steps, length)
    if grade == "exact_truncated":
        places[-1] = _cut(places[-1], length)
    return Reconstruction(tuple(_fitting(places, length)), grade)


def _grade(steps: Steps, length: int) -> Grade:
    over = 1 + sum(a + 1 for a in steps.accepted) - length
    if over == 0:
        return "exact"
    return "exact_truncated" if 0 < over <= steps.accepted[-1] else "approx"


def _padded(steps: Steps, prompt: int) -> bool:
    """Whether the first step may have had padding in the place of a proposal."""
    return prompt % BLOCK == 1 and (steps.accepted[0], steps.drafted[0]) == (0, steps.k)


def _short(places: Sequence[Place], k: int, limit: int | None) -> bool:
    """Whether a step proposed less than it could: k tokens, or all but the last of those that the limit leaves."""
    return any(
        place.proposed < (k if limit is None else min(k, limit - place.start - 1)) or not place.proposed
        for place in places
    )


def _laid_out(steps: Steps) -> list[Place]:
    """Each step where it begins if none is missing."""
    at, places = 1, []
    for accepted, drafted in zip(steps.accepted, steps.drafted, strict=True):
        places.append(Place(at, drafted, accepted))
        at += accepted + 1
    return places


def _cut(last: Place, length: int) -> Place:
    committed = length - last.start
    return Place(last.start, committed, committed)


def _fitting(places: Sequence[Place], length: int) -> list[Place]:
    """As a record holds them: of a proposal that reached beyond the output's end only what is within."""
    within = [place for place in places if place.start < length and place.start + place.accepted <= length]
    return [Place(place.start, min(place.proposed, length - place.start), place.accepted) for place in within]
