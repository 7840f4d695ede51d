"""The early exit of streams: what it says before the last layers, and that it learns to say it."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from adapter.distil import DistilConfig, distil
from adapter.drafters.early_exit import NEVER
from adapter.drafters.kinds import Sizes, first_version
from adapter.drafters.shared import Shared
from adapter.drafters.streaming import Streaming
from adapter.target import Target
from storage.records import FeedbackRecord
from tests.adapter.conditioned import WHOLE, hidden_of, read_again, shaken

EVEN = torch.arange(0, 318, 2)


def first(target: Target, tokens: Tensor) -> Streaming:
    made = first_version("streaming", target.model, Shared(target.embedding, target.files), tokens, Sizes(1, 2, 8))
    assert isinstance(made, Streaming)
    return made


@torch.no_grad()
def right(target: Target, drafter: Streaming, answered: Sequence[FeedbackRecord]) -> float:
    """How often the exit's likeliest token is the one that was emitted."""
    found = []
    for record in answered:
        tokens = [*record.prompt.tolist(), *record.output.tolist()]
        states = drafter.exit_states(hidden_of(target, drafter, tokens))
        assert states is not None
        said = drafter.draft_to_target[drafter.logits(states).argmax(-1)]
        found.append((said[len(record.prompt) : -1] == torch.tensor(tokens[len(record.prompt) + 1 :])).float())
    return float(torch.cat(found).mean())


def test_it_learns_with_the_streams(target: Target, answered: list[FeedbackRecord]) -> None:
    parent = first(target, torch.arange(target.vocab_size))
    config = DistilConfig(epochs=20, learning_rate=1e-2, max_context=WHOLE)
    student = distil(parent, read_again(target, parent, answered), config).student
    assert isinstance(student, Streaming)
    before, after = right(target, parent, answered), right(target, student, answered)
    assert after > before + 0.1, (before, after)


@torch.inference_mode()
def test_it_gives_log_probabilities_of_known_tokens(target: Target) -> None:
    drafter, states = shaken(first(target, EVEN)), torch.randn(2, 3, 32)
    assert isinstance(drafter, Streaming)
    tokens = torch.tensor([[4, 7, 10], [0, 2, 5]])
    found = drafter.log_probs(states, tokens)
    assert drafter.exit is not None
    logs = drafter.logits(drafter.decoder.norm(drafter.exit(states))).log_softmax(-1)
    for row, place, node in [(0, 0, 0), (0, 2, 2), (1, 1, 0), (1, 2, 1)]:
        expected = logs[row, place, tokens[row, node] // 2]
        torch.testing.assert_close(found[row, place, node], expected)
    assert (found[0, :, 1] == NEVER).all()
    assert (found[1, :, 2] == NEVER).all()


def test_drafters_without_one_have_nothing_to_say(target: Target) -> None:
    drafter = first(target, EVEN)
    config = {**drafter.config.to_dict(), "exit_rank": 0}
    other = Streaming(type(drafter.config).from_dict(config), drafter.shared)
    assert other.early is None
    assert other.exit_states(torch.zeros(1, 1, 32)) is None
    assert not any(name.startswith("exit") for name in other.own_tensors())


def test_what_a_drafter_of_before_is_built_from_is_as_it_was(target: Target) -> None:
    """A version's file carries its configuration, which must be the stored one."""
    config = replace(first(target, EVEN).config, exit_rank=0, exit_layer=0)
    assert not {"passes", "exit_rank", "exit_layer"} & config.to_dict().keys()
    assert type(config).from_dict(config.to_dict()) == config
    other = replace(config, passes=1, exit_rank=4, exit_layer=1)
    assert type(config).from_dict(other.to_dict()) == other
