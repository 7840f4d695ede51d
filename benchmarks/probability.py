"""Acceptance probability: mean over contexts of sum(min(p, q)), on outputs that the target wrote by itself."""

from collections.abc import Sequence

import torch
from torch import Tensor

from adapter.acceptance import acceptance_probability
from adapter.drafters.causal_lm import CausalLM
from adapter.policy import Policy
from adapter.processing import probabilities
from adapter.target import Target

Text = tuple[Sequence[int], Sequence[int]]  # prompt and output


@torch.inference_mode()
def mean_acceptance(target: Target, drafter: CausalLM, policy: Policy, texts: Sequence[Text]) -> float:
    """Over all output positions but each first one, which comes out of the prefill and is never drafted."""
    found = [_at_positions(target, drafter, policy, prompt, output) for prompt, output in texts if len(output) > 1]
    return float(torch.cat(found).mean()) if found else 0.0


def _at_positions(
    target: Target, drafter: CausalLM, policy: Policy, prompt: Sequence[int], output: Sequence[int]
) -> Tensor:
    tokens = torch.tensor([[*prompt, *output[:-1]]], device=target.device)
    count = len(output) - 1
    theirs = target.model(input_ids=tokens, logits_to_keep=count).logits[0]
    ours = drafter.logits(drafter.hidden(tokens)[0, -count:])
    if policy.greedy:
        agreed: Tensor = drafter.draft_to_target[ours.argmax(-1)] == theirs.argmax(-1)
        return agreed.float().cpu()
    p, q = (probabilities(logits[None], [policy])[0] for logits in (theirs, ours))
    return acceptance_probability(p[:, drafter.draft_to_target], q).cpu()
