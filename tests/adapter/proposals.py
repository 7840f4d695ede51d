"""What proposals, chains and trees, are asked for in these tests, and of which drafter."""

import torch

from adapter.drafters.causal_lm import CausalLM
from adapter.policy import Policy
from adapter.target import Target

NEVER = -1e30
PENALISED = {"repetition_penalty": 1.4, "frequency_penalty": 0.5, "logit_bias": ((9, 2.0), (12, 1.0))}
POLICIES = [
    Policy(1.0),
    Policy(0.0),
    Policy(1.5, top_k=20, top_p=0.9),
    Policy(1.2, **PENALISED),  # type: ignore[arg-type]
    Policy(0.0, **PENALISED),  # type: ignore[arg-type]
]
PROMPTS = [[5, 9, 31], [8], [40, 41, 42, 43, 44], [9, 9, 12], [7, 30]]


def every_third(target: Target) -> CausalLM:
    """A drafter over every third token, in no order."""
    tokens = torch.randperm(107, generator=torch.Generator().manual_seed(1)) * 3
    return CausalLM.from_target(target.model, 2, tokens[tokens < target.vocab_size])
