"""vLLM's side of a proposer, without vLLM: a scheduler and a batch that do to rows what its own do.

Rows join, move into the holes of those that left, are preempted and come back, are cut short by an end of text or a
bound; prompts are read in pieces; of a proposal only a part may be verified. What a target would say is a given text.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from adapter.drafters.causal_lm import CausalLM

Step = Callable[[list[list[int]], Any, Any], list[list[int]]]


@dataclass
class Played:
    """What the scheduler counts of one round: vLLM's per_step_drafted and per_step_accepted."""

    start: int
    drafted: list[int]
    accepted: int


@dataclass
class Asked:
    """A request, and what the scheduler knows of it."""

    id: str
    prompt: list[int]
    says: list[int]  # what the target says after the prompt, past any end
    max_tokens: int
    stop: frozenset[int] = frozenset()
    params: dict[str, Any] = field(default_factory=dict)
    read: int = 0  # tokens of the prompt
    worker: list[int] = field(default_factory=list)  # output as the worker has it
    output: list[int] = field(default_factory=list)  # as the client gets it
    rounds: list[Played] = field(default_factory=list)
    proposal: list[int] = field(default_factory=list)
    done: bool = False

    @property
    def text(self) -> list[int]:
        return self.prompt[: self.read] + self.worker

    def state(self) -> SimpleNamespace:
        """As the model runner keeps it."""
        params = {
            "temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0,
            "presence_penalty": 0.0, "frequency_penalty": 0.0, "max_tokens": self.max_tokens, "extra_args": None,
            "eos_token_id": None, "stop_token_ids": sorted(self.stop), "bad_words": None, "allowed_token_ids": None,
            "logit_bias": None, "min_tokens": 0, "structured_outputs": None, **self.params,
        }  # fmt: skip
        return SimpleNamespace(
            prompt_token_ids=self.prompt,
            sampling_params=SimpleNamespace(**params),
            mm_features=[],
            lora_request=None,
            output_token_ids=self.worker,
        )


class Engine:
    """Runs requests to their end around a core's `begins` and `step`."""

    def __init__(
        self, rows: int, context: int, chunk: int = 10_000, seed: int = 0, trims: bool = False, blind: float = 0.0
    ) -> None:
        """`blind`: share of the steps in which the proposer is not called, and zeros are proposed in its place."""
        self.rows, self.chunk, self._trims, self._blind = rows, chunk, trims, blind
        self.random = random.Random(seed)
        self.waiting: list[Asked] = []
        self.batch: list[Asked] = []
        self.preempted: list[Asked] = []
        self.ended: list[str] = []  # to be told of with the next step
        self.new: list[str] = []
        noise = np.random.default_rng(seed)
        self._tokens = noise.integers(0, 99, (rows + 3, context + 8), dtype=np.int32)  # longer than the batch, and full
        self._lengths = noise.integers(0, context, rows + 3, dtype=np.int32)
        self.input_batch = SimpleNamespace(req_ids=[])
        self.requests: dict[str, Any] = {}
        self.steps = self.blind_steps = 0

    def submit(self, asked: Asked) -> Asked:
        self.waiting.append(asked)
        return asked

    def run(self, begins: Callable[[Any, Any], None], step: Step) -> None:
        """Until every request is done, and the worker was told of the last ones."""
        while self.waiting or self.batch or self.preempted or self.ended:
            self.step(begins, step)

    def step(self, begins: Callable[[Any, Any], None], step: Step) -> None:
        self.steps += 1
        self._schedule()
        scheduled = SimpleNamespace(
            finished_req_ids=set(self.ended),
            scheduled_new_reqs=[SimpleNamespace(req_id=request_id) for request_id in self.new],
            scheduled_spec_decode_tokens={a.id: a.proposal for a in self.batch if a.proposal},
        )
        begins(self, scheduled)
        self.ended, self.new = [], []
        self.input_batch.req_ids = [asked.id for asked in self.batch]
        going = {asked.id: asked.state() for asked in [*self.batch, *self.preempted]}
        self.requests.clear()
        self.requests.update(going)
        if not self.batch:
            return
        committed = [self._verify(asked) for asked in self.batch]
        for row, asked in enumerate(self.batch):
            self._tokens[row, : len(asked.text)] = asked.text
            self._lengths[row] = len(asked.text)
        blind = self.random.random() < self._blind
        self.blind_steps += blind
        chains = [[0] * 3 for _ in committed] if blind else step(committed, self._lengths, self._tokens)
        assert len(chains) == len(self.batch), "a chain a row"
        for asked, chain, new in zip(self.batch, chains, committed, strict=True):
            assert new or not chain or blind, "nothing is proposed for a row that got no token"
            asked.proposal = chain
        self._update(committed)

    def preempt(self, at: int) -> None:
        """Take a row out of the batch; it comes back when there is room."""
        self.preempted.append(self._remove(at))

    def _schedule(self) -> None:
        while len(self.batch) < self.rows and (self.preempted or self.waiting):
            if self.preempted and (not self.waiting or self.random.random() < 0.5):
                back = self.preempted.pop()
                back.proposal = []  # vLLM drops it when it preempts
                self.batch.append(back)
            else:
                self.batch.append(self.waiting.pop(0))
                self.new.append(self.batch[-1].id)
        for asked in self.batch:
            if self._trims and self.random.random() < 0.3:
                asked.proposal = asked.proposal[: self.random.randrange(len(asked.proposal) + 1)]

    def _verify(self, asked: Asked) -> list[int]:
        """The tokens that the target commits in this step; it looks past no end."""
        if asked.read < len(asked.prompt):
            asked.read = min(asked.read + self.chunk, len(asked.prompt))
            if asked.read < len(asked.prompt):
                return []
        start = len(asked.worker)
        accepted = 0
        while accepted < len(asked.proposal) and asked.proposal[accepted] == asked.says[start + accepted]:
            accepted += 1
        new = asked.says[start : start + accepted + 1]
        if asked.proposal:
            asked.rounds.append(Played(start, asked.proposal, accepted))
        asked.worker += new
        return new

    def _update(self, committed: Sequence[Sequence[int]]) -> None:
        """What the scheduler does with a step's tokens: it ends requests, and the worker hears of it a step later."""
        for asked, new in zip(self.batch, committed, strict=True):
            for token in new:
                asked.output.append(token)
                if token in asked.stop or len(asked.output) >= asked.max_tokens:
                    asked.done = True
                    break
        for row in reversed(range(len(self.batch))):
            if self.batch[row].done:
                self.ended.append(self._remove(row).id)

    def _remove(self, row: int) -> Asked:
        """The last row moves into the hole."""
        asked = self.batch[row]
        last = self.batch.pop()
        if last is not asked:
            self.batch[row] = last
        return asked


def said_by(drafter: CausalLM, prompt: list[int], length: int, seed: int, agrees: float = 0.75) -> list[int]:
    """A text after the prompt, most of whose tokens are those that the drafter would propose."""
    noise, text = random.Random(seed), list(prompt)
    while len(text) < len(prompt) + length:
        likely = best_after(drafter, text)
        text.append(likely if noise.random() < agrees else noise.randrange(drafter.vocab_size))
    return text[len(prompt) :]


@torch.inference_mode()
def best_after(drafter: CausalLM, text: Sequence[int]) -> int:
    """The drafter's next token by one full forward and no memory."""
    logits = drafter.logits(drafter.hidden(torch.tensor([list(text)]))[0, -1])
    return int(drafter.draft_to_target[int(logits.argmax())])


def chain_after(drafter: CausalLM, text: Sequence[int], length: int) -> list[int]:
    """Its proposal of so many tokens, from scratch."""
    found = list(text)
    for _ in range(length):
        found.append(best_after(drafter, found))
    return found[len(text) :]
