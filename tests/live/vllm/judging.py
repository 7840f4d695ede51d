"""Where two greedy outputs of one request part, and whether the target's own logits are a near-tie there."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import comb

from adapter.target import Target
from service.engine.audit import ROUNDINGS, Identity, compare
from tests.live.vllm.rig import Answer


@dataclass(frozen=True)
class Judged:
    """Outputs of one arm against the same requests alone and without speculation."""

    arm: str
    found: tuple[Identity, ...]

    @property
    def verdicts(self) -> Counter[str]:
        return Counter(identity.verdict for identity in self.found)

    @property
    def departed(self) -> int:
        return len(self.found) - self.verdicts["identical"]

    @property
    def widest(self) -> float:
        """The widest gap between the two tokens, in units of the dtype's epsilon times the largest logit."""
        return max((ROUNDINGS * one.gap / one.bound for one in self.found if one.bound), default=0.0)

    def __str__(self) -> str:
        return (
            f"{self.arm}: {len(self.found)} requests, {dict(self.verdicts)}; widest gap {self.widest:.2f} roundings "
            f"(bound {ROUNDINGS:g})"
        )


def judged(arm: str, target: Target, alone: Sequence[Answer], others: Sequence[Answer]) -> Judged:
    return Judged(
        arm,
        tuple(
            compare(target, one.prompt_ids, one.tokens, other.tokens) for one, other in zip(alone, others, strict=True)
        ),
    )


def as_often(one: int, of_one: int, other: int, of_other: int) -> float:
    """Fisher's exact test, one-sided: the chance that `other` departs so much oftener than `one` if neither does."""
    total, departed = of_one + of_other, one + other
    ways = comb(total, departed)
    return sum(
        comb(of_other, x) * comb(of_one, departed - x) / ways
        for x in range(other, min(departed, of_other) + 1)
        if departed - x <= of_one
    )
