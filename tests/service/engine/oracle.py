"""The slow, obvious way to decode, which the engine is held against; and what tests need to run the engine."""

import queue
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count

import torch

from adapter.drafters.causal_lm import CausalLM
from adapter.drafters.protocol import Drafter
from adapter.policy import Policy
from adapter.target import Target
from service.engine.engine import Engine, EngineConfig
from service.engine.generation import Delta, Generation, Usage
from service.engine.governor import GovernorConfig

GREEDY = Policy(temperature=0.0)
UNGOVERNED = GovernorConfig(governor=False)
_ids = count()


def plain_greedy(target: Target, prompt: list[int], max_tokens: int) -> list[int]:
    """Greedy decoding with one full forward a token and no memory of any kind."""
    output: list[int] = []
    with torch.inference_mode():
        while len(output) < max_tokens:
            logits = target.model(input_ids=torch.tensor([prompt + output])).logits[0, -1]
            output.append(int(logits.argmax()))
            if output[-1] in target.eos_ids:
                break
    return output


def first_layers(target: Target, layers: int = 1, vocabulary: int | None = None, seed: int | None = None) -> CausalLM:
    """A drafter of the target's first layers; with a seed, its weights are shaken so that versions differ."""
    drafter = CausalLM.from_target(target.model, layers, torch.arange(vocabulary or target.vocab_size))
    if seed is not None:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in drafter.trainable():
                parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    return drafter


@dataclass
class Client:
    """A request and what came back for it."""

    generation: Generation
    deltas: "queue.Queue[Delta]" = field(default_factory=queue.Queue)
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    last: Delta | None = None

    def wait(self, timeout: float = 60.0) -> list[int]:
        """The output's token ids, once the request has finished."""
        while self.last is None:
            delta = self.deltas.get(timeout=timeout)
            self.text += delta.text
            self.tokens += delta.token_ids
            if delta.finish_reason:
                self.last = delta
        return self.tokens

    @property
    def usage(self) -> Usage:
        self.wait()
        assert self.last is not None
        assert self.last.usage is not None
        return self.last.usage


def ask(engine: Engine, prompt: list[int], max_tokens: int = 24, policy: Policy = GREEDY, **options: object) -> Client:
    """Submit a request to the engine."""
    deltas: queue.Queue[Delta] = queue.Queue()
    generation = Generation(f"r{next(_ids)}", prompt, policy, max_tokens, deltas.put, **options)  # type: ignore[arg-type]
    engine.submit(generation)
    return Client(generation, deltas)


@contextmanager
def running(
    target: Target, drafter: Drafter | None = None, governed: bool = False, **config: float | str
) -> Iterator[Engine]:
    """An engine at work, with `drafter` as its version 1; ungoverned, it proposes as long a chain as it may.

    Without audits, which would now and then decode beside a request and round it otherwise.
    """
    config = {"context": 128, "slots": 4, "audit_share": 0.0, **config}
    engine = Engine(target, EngineConfig(**config), lambda generation: None, GovernorConfig(governor=governed))  # type: ignore[arg-type]
    engine.start()
    try:
        if drafter is not None:
            engine.swap(1, drafter).result(timeout=30)
        yield engine
    finally:
        engine.stop()


def random_prompt(target: Target, seed: int, length: int = 8) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, target.vocab_size, (length,), generator=generator).tolist()


def check_swaps(
    target: Target, first: Drafter, line: Sequence[Drafter | None], max_tokens: int = 80, **config: float | str
) -> list[Client]:
    """The drafters take over one after another in the middle of requests: no token changes, and nothing fails."""
    prompts = [random_prompt(target, seed, 12) for seed in range(4)]
    with running(target, first, **config) as engine:
        clients = [ask(engine, prompt, max_tokens) for prompt in prompts]
        for number, drafter in enumerate(line, start=2):
            engine.swap(number, drafter).result(timeout=30)
        outputs = [client.wait() for client in clients]
        assert engine.lanes.faults == 0
    assert outputs == [plain_greedy(target, prompt, max_tokens) for prompt in prompts]
    return clients
