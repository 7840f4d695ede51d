"""The peers: transformers' own `generate`, plain and assisted, with the same target and drafter weights.

They get what is best for them: a model of their own, untouched by what our engine does to the target, the default
cache, and an assistant whose head computes the draft vocabulary alone. A batch is one call, padded on the left,
and over when its longest answer is.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.utils import logging

from adapter.drafters.causal_lm import CausalLM
from adapter.target import Target
from benchmarks.arms import Play
from benchmarks.machine import peak_memory
from benchmarks.run import Answer, PlayedRound, Progress, Run


class Peer:
    """transformers' target and assistant, shared by its arms."""

    def __init__(self, target: Target, drafter: CausalLM) -> None:
        self.target = target
        self.model = AutoModelForCausalLM.from_pretrained(target.files.path, dtype=target.dtype)
        self.model.to(target.device).eval().requires_grad_(False)
        self.model.generation_config = GenerationConfig()
        self.assistant = assistant(drafter, self.model.get_input_embeddings().weight.detach())
        self.recorder = Recorder(self.model, self.assistant)
        logging.set_verbosity_error()  # its assistant calls `generate` in a way that transformers warns about

    def arms(self, ks: Sequence[int], batch: int) -> "list[HfArm]":
        """Assisted generation takes one request at a time, so it stands at batch 1 alone."""
        return [HfArm(self, batch), *(HfArm(self, 1, k) for k in ks if batch == 1)]


@dataclass(frozen=True)
class Noted:
    """One forward of the target in `generate`."""

    began: float  # when its proposal was begun, or itself where there is none
    drafted: float
    proposed: int
    held: int  # tokens in the target's memory before it


class Recorder:
    """Notes every forward of the target, and what the assistant proposed before it."""

    def __init__(self, model: Any, assistant: Any) -> None:
        self.rounds: list[Noted] = []
        self._drafted: tuple[float, int] | None = None  # when the assistant began, and what it proposed
        model.register_forward_pre_hook(self._before, with_kwargs=True)
        self._watch(assistant)

    def clear(self) -> None:
        self.rounds.clear()
        self._drafted = None

    def _watch(self, assistant: Any) -> None:
        propose = assistant.generate

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = perf_counter()
            made = propose(*args, **kwargs)
            self._drafted = began, made.sequences.shape[1] - kwargs["input_ids"].shape[1]
            return made

        assistant.generate = timed

    def _before(self, module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        at = perf_counter()
        began, proposed = self._drafted or (at, 0)
        self.rounds.append(Noted(began, at, proposed, kwargs["cache"].get_seq_length()))
        self._drafted = None


class HfArm:
    """`hf_plain`, or with a k `hf_assisted`."""

    def __init__(self, peer: Peer, batch: int, k: int | None = None) -> None:
        self.name, self.k = "hf_plain" if k is None else "hf_assisted", k
        self._peer, self._batch = peer, batch

    def run(self, play: Play) -> Run:
        with peak_memory() as peak:
            began = perf_counter()
            parts = [self._call(play, batch) for batch in _batches(play.prompts, self._batch)]
            seconds = perf_counter() - began
        answers = tuple(answer for found, _ in parts for answer in found)
        return Run(answers, seconds, _joined([progress for _, progress in parts]), peak[0])

    def close(self) -> None:
        """There is nothing to stop."""

    def _call(self, play: Play, prompts: Sequence[Sequence[int]]) -> tuple[list[Answer], Progress]:
        peer, width, device = self._peer, max(map(len, prompts)), self._peer.target.device
        tokens = torch.tensor([[0] * (width - len(p)) + list(p) for p in prompts], device=device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device)
        peer.recorder.clear()
        began = perf_counter()
        with torch.inference_mode():
            found = peer.model.generate(
                tokens, attention_mask=mask, generation_config=self._generation(play), **self._helper()
            )
        ended = perf_counter()
        outputs = [self._cut(row) for row in found[:, width:].tolist()]
        rounds = _rounds(peer.recorder.rounds, width, found.shape[1], ended)
        answers = [Answer(output, (ended - began) * 1e3, rounds) for output in outputs]
        return answers, _progress(peer.recorder.rounds, outputs, width, ended)

    def _helper(self) -> dict[str, Any]:
        if self.k is None:
            return {}
        self._peer.assistant.generation_config.num_assistant_tokens = self.k
        return {"assistant_model": self._peer.assistant}

    def _generation(self, play: Play) -> GenerationConfig:
        """The policy, with everything that transformers would do of itself switched off."""
        sampled = {} if play.policy.greedy else {"temperature": play.policy.temperature, "top_k": 0, "top_p": 1.0}
        return GenerationConfig(
            max_new_tokens=play.max_tokens,
            do_sample=not play.policy.greedy,
            eos_token_id=sorted(self._peer.target.eos_ids) or None,
            pad_token_id=min(self._peer.target.eos_ids, default=0),
            **sampled,
        )

    def _cut(self, row: list[int]) -> tuple[int, ...]:
        """An answer up to its own end: what follows in a longer batch is padding."""
        ends = [i for i, token in enumerate(row) if token in self._peer.target.eos_ids]
        return tuple(row[: ends[0] + 1] if ends else row)


def assistant(drafter: CausalLM, embedding: Tensor) -> Any:
    """The drafter as transformers wants it: a causal LM with logits over the target's whole vocabulary."""
    own = CausalLM(drafter.config, embedding if drafter.config.shares_embedding else drafter.embedding)
    own.load_own(drafter.own_tensors())
    shape = {**drafter.config.decoder, "vocab_size": 1, "pad_token_id": None, "bos_token_id": None}
    config = AutoConfig.for_model(**{**shape, "eos_token_id": None, "tie_word_embeddings": False})
    model = AutoModelForCausalLM.from_config(config).eval()
    setattr(model, model.base_model_prefix, own.decoder)
    model.set_output_embeddings(WholeVocabulary(own))
    model.config.vocab_size = own.vocab_size
    model.generation_config = GenerationConfig(
        num_assistant_tokens_schedule="constant", assistant_confidence_threshold=0.0
    )
    return model


class WholeVocabulary(nn.Module):
    """The drafter's head; tokens that it never proposes get the lowest logit there is."""

    draft_to_target: Tensor

    def __init__(self, drafter: CausalLM) -> None:
        super().__init__()
        self.head, self._size = drafter.head, drafter.vocab_size
        self.register_buffer("draft_to_target", drafter.draft_to_target, persistent=False)

    def forward(self, hidden: Tensor) -> Tensor:
        known: Tensor = self.head(hidden)
        logits = known.new_full((*hidden.shape[:-1], self._size), torch.finfo(known.dtype).min)
        return logits.index_copy_(-1, self.draft_to_target, known)


def _batches(prompts: Sequence[Sequence[int]], size: int) -> Iterator[Sequence[Sequence[int]]]:
    return (prompts[start : start + size] for start in range(0, len(prompts), size))


def _ends(noted: Sequence[Noted], ended: float) -> list[float]:
    """When each round was over: when the next one began."""
    return [later.began for later in noted[1:]] + [ended]


def _rounds(noted: Sequence[Noted], prompt: int, total: int, ended: float) -> tuple[PlayedRound, ...]:
    """The rounds that proposed something. A round commits its accepted tokens and one more, and the target's memory
    holds all tokens but the last when the next one begins.
    """
    starts = [prompt, *(later.held + 1 for later in noted[1:]), total]
    committed = [after - before for before, after in pairwise(starts)]
    return tuple(
        PlayedRound(
            proposed=one.proposed,
            accepted=min(tokens - 1, one.proposed),
            draft_ms=(one.drafted - one.began) * 1e3,
            verify_ms=(end - one.drafted) * 1e3,
        )
        for one, tokens, end in zip(noted, committed, _ends(noted, ended), strict=True)
        if one.proposed
    )


def _progress(noted: Sequence[Noted], outputs: Sequence[Sequence[int]], prompt: int, ended: float) -> Progress:
    """What came after the first round, which is the prompt's."""
    if len(noted) < 2:
        return Progress(0, 0.0, ())
    first = noted[1].held + 1 - prompt
    tokens = sum(max(len(output) - first, 0) for output in outputs)
    ends = _ends(noted, ended)
    ms = tuple((end - one.began) * 1e3 for one, end in zip(noted[1:], ends[1:], strict=True))
    return Progress(tokens, sum(ms), ms)


def _joined(parts: Sequence[Progress]) -> Progress:
    round_ms = tuple(ms for part in parts for ms in part.round_ms)
    return Progress(sum(part.tokens for part in parts), sum(part.ms for part in parts), round_ms)
