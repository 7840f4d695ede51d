"""A target of six tokens, and what it would say under any policy: small enough that every output can be counted."""

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import product

import numpy as np
import torch
from scipy.stats import chisquare
from transformers import LlamaConfig, LlamaForCausalLM

from adapter.policy import Policy
from adapter.target import Target
from tests.adapter.slow_sampling import distribution

SIZE = 6
LENGTH = 4  # a first token, and a round of two proposals and the next token
PROMPT = [2]

Output = tuple[int, ...]
Allowed = Callable[[Sequence[int]], torch.Tensor]  # after an output so far: bool [V]


def small_target(target: Target, size: int = SIZE) -> Target:
    """Random weights, `target`'s tokenizer, no end of text."""
    config = LlamaConfig(
        vocab_size=size,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
        initializer_range=0.7,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(12)  # one of the models that like to repeat a token, which penalties show on
        model = LlamaForCausalLM(config).eval()
    return Target(**{**vars(target), "model": model, "vocab_size": size, "eos_ids": frozenset()})


def exact(target: Target, policy: Policy, allowed: Allowed | None = None) -> dict[Output, float]:
    """The probability of every output of LENGTH tokens after PROMPT, by full forwards."""
    found: dict[Output, float] = {(): 1.0}
    for length in range(LENGTH):
        outputs = list(product(range(SIZE), repeat=length))
        with torch.inference_mode():
            logits = target.model(input_ids=torch.tensor([[*PROMPT, *output] for output in outputs])).logits[:, -1]
        longer = {}
        for output, row in zip(outputs, logits, strict=True):
            if allowed is not None:
                row = row.masked_fill(~allowed(output), -1e30)
            p = distribution(row, policy, PROMPT, output)
            longer.update({(*output, token): found[output] * p[token] for token in range(SIZE)})
        found = longer
    return found


def p_value(outputs: Sequence[Output], expected: dict[Output, float]) -> float:
    """How well `outputs` follow the `expected` probabilities, by a chi-squared test; 0 where one is impossible.

    Cells of fewer than five expected draws are pooled, as the test asks for.
    """
    counts, draws = Counter(outputs), len(outputs)
    if any(expected[output] == 0.0 for output in counts):
        return 0.0
    rare = [output for output, p in expected.items() if p * draws < 5]
    cells = [[output] for output, p in expected.items() if p * draws >= 5]
    if sum(expected[output] for output in rare) * draws >= 5:
        cells.append(rare)
    else:
        cells[-1] += rare
    seen = [sum(counts[output] for output in cell) for cell in cells]
    odds = np.array([sum(expected[output] for output in cell) for cell in cells])
    return float(chisquare(seen, odds / odds.sum() * draws).pvalue)
