"""Is speculative output the target's own? A share of greedy requests is decoded again plainly, and compared.

Lossy requests are none of the target's own, whatever they say: they are left out, and counted as that.

Floating point rounds differently for different batch shapes. Where two outputs part, the target's logits of
the two tokens must be a near-tie: nearer than the rounding of a pass. Anything else is a defect.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import structlog
import torch

from adapter.target import Target
from service.engine.generation import Delta, Generation
from service.engine.residents import share_of

log = structlog.get_logger()

# How far two passes of different widths may round the difference of two logits apart, in units of the dtype's
# epsilon times the largest logit. The widest gap of 34 departures of SmolLM2 in bf16 was 1.21 (0.25 logits).
ROUNDINGS = 4.0


@dataclass(frozen=True)
class Identity:
    """How an output compares with plain decoding of the same request."""

    verdict: str  # identical, near_tie, different
    position: int = -1  # output index of the first departure
    gap: float = 0.0  # between the target's logits of the two tokens there
    bound: float = 0.0


def compare(target: Target, prompt: list[int], plain: list[int], other: list[int]) -> Identity:
    """Hold `other` against `plain`, both greedy outputs of `prompt`; one target pass where they part."""
    if plain == other:
        return Identity("identical")
    both = zip(plain, other, strict=False)
    at = next((i for i, (a, b) in enumerate(both) if a != b), min(len(plain), len(other)))
    if at >= min(len(plain), len(other)):
        return Identity("different", at)
    tokens = torch.tensor([prompt + plain[:at]], device=target.device)
    with torch.inference_mode():
        logits = target.model(input_ids=tokens, logits_to_keep=1).logits[0, -1].float()
    gap = float((logits.max() - torch.minimum(logits[plain[at]], logits[other[at]])).item())
    bound = ROUNDINGS * torch.finfo(target.dtype).eps * float(logits.abs().max())
    return Identity("near_tie" if gap <= bound else "different", at, gap, bound)


class Audit:
    """Chooses finished requests, has them decoded again while nobody waits, and counts what came of it.

    `submit` queues a request behind all others; False where too many audits wait already.
    """

    def __init__(self, target: Target, share: float, submit: Callable[[Generation], bool]) -> None:
        self._target, self._share, self._submit = target, share, submit
        self.verdicts: Counter[str] = Counter()  # identical, near_tie, different, skipped, lossy

    def consider(self, finished: Generation) -> None:
        """Called by the engine for every finished request."""
        if not finished.lossless:
            self.verdicts["lossy"] += 1
            return
        if not self._auditable(finished) or share_of(f"audit {finished.request_id}") >= self._share:
            return
        tokens: list[int] = []

        def listen(delta: Delta) -> None:
            tokens.extend(delta.token_ids)
            if delta.finish_reason in {"stop", "length"}:
                self._compare(finished, tokens)

        again = Generation(
            request_id=f"audit-{finished.request_id}",
            prompt_ids=finished.prompt_ids,
            policy=finished.policy,
            max_tokens=len(finished.output_ids),
            listener=listen,
            draft_length=0,
            train=False,
            ignore_eos=finished.ignore_eos,
            audit=True,
        )
        if not self._submit(again):
            self.verdicts["skipped"] += 1

    def _auditable(self, finished: Generation) -> bool:
        """Greedy by the target's own logits, with proposals, and at its end."""
        own = finished.policy.greedy and not finished.policy.adjusts and finished.constraint is None
        return own and bool(finished.rounds) and finished.finish_reason in {"stop", "length"}

    def _compare(self, finished: Generation, plain: list[int]) -> None:
        found = compare(self._target, finished.prompt_ids, plain, finished.output_ids)
        self.verdicts[found.verdict] += 1
        if found.verdict == "different":
            log.error(
                "audit.different",
                request_id=finished.request_id,
                position=found.position,
                gap=found.gap,
                bound=found.bound,
                versions=sorted({r.version for r in finished.rounds}),
            )
