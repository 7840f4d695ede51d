"""Speculative streams: what they see, what is the target's and stays it, and where they cannot be."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
)
from transformers.cache_utils import DynamicCache

from adapter.distil import DistilConfig, distil
from adapter.drafters.kinds import Sizes, first_version
from adapter.drafters.learnt import DrafterRefused
from adapter.drafters.protocol import Shape
from adapter.drafters.shared import Shared
from adapter.drafters.streaming import Streaming
from adapter.packing import pack
from adapter.target import Target, load_decoder_tensors
from storage.records import FeedbackRecord
from tests import tiny
from tests.adapter.conditioned import WHOLE, Server, hidden_of, read_again, shaken
from tests.service.engine.oracle import ask, plain_greedy, random_prompt, running

K = 3
TEXT = [5, 9, 31, 7, 12, 40, 41, 8]
SHAPE = {
    **tiny.SHAPE, "num_hidden_layers": 3, "max_position_embeddings": 256, "initializer_range": 0.3, "pad_token_id": 0,
}  # fmt: skip
KEYED = {**SHAPE, "num_key_value_heads": 2}
GROUPED = {**KEYED, "head_dim": 8}


def first(target: Target, layers: int = 2, streams: int = K, rank: int = 4, passes: int = 2) -> Streaming:
    shared, known = Shared(target.embedding, target.files), torch.arange(target.vocab_size)
    made = first_version("streaming", target.model, shared, known, Sizes(layers, streams, rank, passes))
    assert isinstance(made, Streaming)
    return made


def moved(drafter: Streaming) -> Streaming:
    """With adapters that do something, but not so much that a stream attends to one place alone."""
    shaken(drafter, 0.02)
    return drafter


@pytest.fixture(scope="module", params=[1, 2, 3], ids=lambda layers: f"{layers} layers")
def drafter(request: pytest.FixtureRequest, target: Target) -> Streaming:
    return moved(first(target, request.param))


@torch.no_grad()
def said(drafter: Streaming, hidden: Tensor) -> Tensor:
    """What stream j + 1 of each token ends as: [K, n, H], of one text."""
    tokens = torch.zeros(1, len(hidden) + 1, dtype=torch.long)
    longer = torch.cat([hidden, torch.zeros_like(hidden[:1])])[None]
    return torch.cat(list(drafter.unrolled(tokens, longer, None, K)))[:, 1:]


@torch.inference_mode()
def logits_of(target: Target) -> Tensor:
    logits: Tensor = target.model(input_ids=torch.tensor([TEXT])).logits
    return logits


def test_the_main_stream_is_untouched(target: Target, answered: list[FeedbackRecord]) -> None:
    """Bit for bit, while it is read, after streams were trained, and while they are served."""
    before = logits_of(target)
    drafter = moved(first(target))
    hidden_of(target, drafter, TEXT)
    student = distil(drafter, read_again(target, drafter, answered[:3]), DistilConfig(epochs=1, max_context=WHOLE))
    assert torch.equal(logits_of(target), before)
    with running(target, student.student, draft_length=K) as engine:
        assert ask(engine, TEXT).wait() == plain_greedy(target, TEXT, 24)
        assert torch.equal(logits_of(target), before)


def test_what_streams_attend_to_is_the_targets_own_memory(target: Target, drafter: Streaming) -> None:
    """Its keys and values in the last layers, whatever the adapters are."""
    theirs, found = DynamicCache(), DynamicCache()
    with torch.no_grad():
        target.model(input_ids=torch.tensor([TEXT]), cache=theirs, use_cache=True)
        hidden = hidden_of(target, drafter, TEXT)[None]
        drafter.remember(hidden, torch.arange(len(TEXT))[None], found)
    assert len(found.layers) == len(drafter.config.taps)
    for ours, own in zip(found.layers, theirs.layers[-len(drafter.config.taps) :], strict=True):
        for name in ("keys", "values"):
            torch.testing.assert_close(getattr(ours, name), getattr(own, name), atol=1e-5, rtol=1e-4)


def test_a_stream_sees_the_main_one_up_to_its_token_and_nothing_later(target: Target, drafter: Streaming) -> None:
    hidden = hidden_of(target, drafter, TEXT)
    before = said(drafter, hidden)
    for at in range(len(TEXT)):
        changed = hidden.clone()
        changed[at] += 1.0
        after = said(drafter, changed)
        assert torch.equal(after[:, :at], before[:, :at])
        differs = (after != before).any(-1)
        assert differs[:, at:].all(), f"token {at} is seen by all streams from there on"


def test_a_stream_sees_the_lower_ones_of_its_token_and_no_higher_one(target: Target, drafter: Streaming) -> None:
    hidden = hidden_of(target, drafter, TEXT)
    before = said(drafter, hidden)
    for stream in range(K):
        other = drafter.twin()
        with torch.no_grad():
            other.identifiers[stream] += 1.0
        differs = (said(other, hidden) != before).any(-1)
        assert not differs[:stream].any()
        assert differs[stream:].all()


def test_streams_of_other_tokens_are_not_seen(target: Target, drafter: Streaming) -> None:
    """Those of one token alone, at their places in a server's memory, end as among those of all tokens."""
    hidden = hidden_of(target, drafter, TEXT)
    server = Server(target, drafter, 1)
    server.follow([[*TEXT, 0]])
    with torch.inference_mode():
        made = drafter.propose(server.memory, server.rows([[*TEXT, 0]], K), Shape.chain(K))
        expected = drafter.logits(said(drafter, hidden)[:, -1]).argmax(-1)
    assert made.tokens[0].tolist() == expected.tolist()


def test_untrained_streams_begin_as_copies_of_the_main_one(target: Target) -> None:
    drafter, states = first(target), torch.randn(4, 32)
    assert torch.equal(drafter.begun(states), states[:, None].expand(-1, K, -1))


def test_a_version_is_stream_vectors_adapters_and_the_draft_tokens(target: Target) -> None:
    drafter = first(target)
    own = drafter.own_tensors()
    assert {name.split(".")[0] for name in own} == {"identifiers", "begin", "exit", "decoder", "draft_to_target"}
    assert all(".adapter." in name for name in own if name.startswith("decoder."))
    shared = {weight.data_ptr() for weight in drafter.parameters() if not weight.requires_grad}
    assert len(shared) > 2 * 7
    assert not {tensor.data_ptr() for tensor in own.values()} & shared
    assert set(own) == {name for name, weight in drafter.named_parameters() if weight.requires_grad} | {
        "draft_to_target"
    }


def test_all_versions_in_a_process_run_through_the_same_layers(target: Target) -> None:
    drafter = first(target)
    shared = {name: weight.data_ptr() for name, weight in drafter.decoder.named_parameters() if ".base." in name}
    for other in (drafter.twin(), drafter.fresh()):
        theirs = {name: weight.data_ptr() for name, weight in other.decoder.named_parameters() if ".base." in name}
        assert theirs == shared


def test_training_leaves_the_shared_layers_as_they_are(target: Target, answered: list[FeedbackRecord]) -> None:
    drafter = first(target)
    before = {name: tensor.clone() for name, tensor in drafter.state_dict().items()}
    student = distil(drafter, read_again(target, drafter, answered[:3]), DistilConfig(epochs=1, max_context=WHOLE))
    after, own = student.student.state_dict(), student.student.own_tensors()
    for name, tensor in before.items():
        trained = name in own and name != "draft_to_target"
        assert torch.equal(after[name], tensor) is not trained, name


def on_disk(target: Target, config: Any, folder: Path) -> Target:
    """A target of another family with its files, and the tiny target's tokenizer."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(config).float().eval().requires_grad_(False)
    model.save_pretrained(folder, max_shard_size="40KB")
    files = replace(target.files, path=folder)
    pack(model)
    return replace(target, model=model, files=files, context=256)


@pytest.mark.parametrize(
    "config",
    [
        Qwen2Config(**GROUPED),
        Qwen3Config(**GROUPED),
        MistralConfig(**GROUPED, sliding_window=12),
        Gemma2Config(**GROUPED, sliding_window=12, query_pre_attn_scalar=8),
        LlamaConfig(**GROUPED, tie_word_embeddings=False, attention_bias=True, mlp_bias=True),
    ],
    ids=lambda config: config.model_type,
)
@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize(("nodes", "kept"), [(0, 0), (9, 0), (9, 4)], ids=["chain", "tree", "pruned"])
def test_other_families_serve_and_their_output_is_the_plain_one(
    target: Target, tmp_path: Path, config: Any, nodes: int, kept: int, passes: int
) -> None:
    family = on_disk(target, config, tmp_path)
    drafter = shaken(first(family, passes=passes))
    prompts = [random_prompt(family, seed, length) for seed, length in enumerate((3, 11, 40))]
    with running(family, drafter, slots=3, draft_length=K, tree_nodes=nodes, tree_kept=kept) as engine:
        clients = [ask(engine, prompt, max_tokens=30) for prompt in prompts]
        outputs = [client.wait() for client in clients]
        assert all(client.usage.rounds for client in clients)
        assert engine.lanes.faults == 0
    assert outputs == [plain_greedy(family, prompt, 30) for prompt in prompts]


@pytest.mark.parametrize(
    "config",
    [
        GPTNeoXConfig(**SHAPE),  # other names
        Phi3Config(**KEYED),  # queries, keys and values in one projection
        Olmo2Config(**KEYED),  # norms elsewhere
        CohereConfig(**KEYED),  # other rotary embeddings
        Gemma3TextConfig(**GROUPED, query_pre_attn_scalar=8),  # and two kinds of them
    ],
    ids=lambda config: config.model_type,
)
def test_families_whose_layers_are_built_otherwise_are_refused(target: Target, tmp_path: Path, config: Any) -> None:
    with pytest.raises(DrafterRefused, match="use causal_lm, medusa, mtp or eagle"):
        first(on_disk(target, config, tmp_path))


def test_a_target_that_is_not_what_its_files_say_is_refused(target: Target, tmp_path: Path) -> None:
    other = on_disk(target, LlamaConfig(**GROUPED), tmp_path)
    with pytest.raises(DrafterRefused, match="do not run alike"):
        first(replace(target, model=other.model))
    with pytest.raises(DrafterRefused, match="do not hold the layers"):
        first(replace(other, files=replace(other.files, path=tmp_path / "nothing")))


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ((0, 3, 4), "0 layers"),
        ((4, 3, 4), "4 layers"),
        ((2, 0, 4), "0 streams"),
        ((2, 3, 0), "rank 0"),
    ],
)
def test_sizes_that_make_no_sense_are_refused(target: Target, sizes: tuple[int, int, int], reason: str) -> None:
    with pytest.raises(DrafterRefused, match=f"{reason}.*: ask for 1"):
        first(target, *sizes)


def test_a_decoders_tensors_are_read_by_its_own_names_out_of_several_files(target: Target, tmp_path: Path) -> None:
    other = on_disk(target, LlamaConfig(**GROUPED), tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    own = other.model.get_decoder().state_dict()
    found = load_decoder_tensors(other.files, ["norm.weight", "layers.2.self_attn.q_proj.weight", "layers.9.x"])
    assert set(found) == {"norm.weight", "layers.2.self_attn.q_proj.weight"}
    assert all(torch.equal(tensor, own[name]) for name, tensor in found.items())
