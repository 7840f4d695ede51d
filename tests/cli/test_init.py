"""`redraft init`: version 1 of a drafter on a tiny target, and what it refuses."""

import json
from pathlib import Path

import pytest

from adapter.drafters.learnt import LearntDrafter
from adapter.target import Target
from adapter.versions import Versions
from cli.init import SAMPLE_PROMPTS, read_prompts
from cli.output import CommandError
from storage.registry import Registry
from storage.weights import WeightsStore
from tests.cli.conftest import Run
from tests.tiny import tiny_target_dir, tiny_tokenizer

SMALL = ("--layers", "1", "--draft-vocab", "48")


@pytest.fixture(autouse=True)
def prompts(home: Path, target_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Settings for the tiny target, and a few prompts, so that the target has little to answer."""
    monkeypatch.setenv("REDRAFT_TARGET", str(target_dir))
    monkeypatch.setenv("REDRAFT_CACHE", str(target_dir / "cache"))
    monkeypatch.setenv("REDRAFT_DTYPE", "fp32")
    monkeypatch.setenv("REDRAFT_DEVICE", "cpu")
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "select name from city"}\n\n{"prompt": "Hello, world!", "workload": "chat"}\n')
    return path


def made(registry: Registry, store: WeightsStore, target: Target, name: str) -> LearntDrafter:
    """The live version of a drafter, loaded as a server loads it."""
    versions = Versions(store, target.files, target.embedding)
    return versions.load(registry.live(name), registry.drafter(name))


def test_version_1_is_live_and_loads_for_its_target(
    redraft: Run, registry: Registry, store: WeightsStore, target: Target, prompts: Path
) -> None:
    result = redraft("init", "chat", *SMALL, "--prompts", str(prompts))
    assert result.exit_code == 0
    assert "version 1 is live" in result.stdout
    drafter = registry.drafter("chat")
    assert drafter.target_fingerprint == target.files.fingerprint
    loaded = made(registry, store, target, "chat")
    assert (loaded.config.layers, loaded.config.draft_vocab) == (1, 48)


def test_the_draft_vocabulary_is_what_the_target_says_and_the_special_tokens(
    redraft: Run, registry: Registry, store: WeightsStore, target: Target, prompts: Path
) -> None:
    from adapter.sample import answers, chat_prompt

    redraft("init", "chat", "--layers", "1", "--draft-vocab", "200", "--prompts", str(prompts))
    said = answers(target, [chat_prompt(target, text) for text in read_prompts(prompts)], 64)
    emitted = {int(token) for answer in said for token in answer.output}
    vocabulary = set(made(registry, store, target, "chat").draft_to_target.tolist())
    assert len(emitted) < 190
    assert emitted <= vocabulary
    assert target.eos_ids <= vocabulary


def test_a_warm_up_makes_another_version_1(
    redraft: Run, registry: Registry, store: WeightsStore, target: Target, prompts: Path
) -> None:
    assert redraft("init", "cold", *SMALL, "--prompts", str(prompts)).exit_code == 0
    warm = redraft("init", "warm", *SMALL, "--prompts", str(prompts), "--warm-up")
    assert "warm-up:" in warm.stdout
    assert registry.live("cold").weights_sha256 != registry.live("warm").weights_sha256
    made(registry, store, target, "warm")


def test_an_existing_checkpoint_keeps_its_layers_and_all_its_tokens(
    redraft: Run, registry: Registry, store: WeightsStore, target: Target, prompts: Path, tmp_path: Path
) -> None:
    checkpoint = tiny_target_dir(tmp_path / "small", seed=5, layers=1, hidden=16)
    result = redraft("init", "chat", "--checkpoint", str(checkpoint), "--prompts", str(prompts))
    assert result.exit_code == 0
    loaded = made(registry, store, target, "chat")
    assert (loaded.config.layers, loaded.config.draft_vocab) == (1, target.vocab_size)


@pytest.mark.parametrize(("host", "kind"), [("vllm", "medusa"), ("vllm_push", "eagle"), ("llamacpp", "streaming")])
def test_a_kind_that_the_host_cannot_serve_is_refused_with_the_reason_before_anything_is_made(
    redraft: Run, registry: Registry, prompts: Path, monkeypatch: pytest.MonkeyPatch, host: str, kind: str
) -> None:
    monkeypatch.setenv("REDRAFT_TARGET", "/nowhere/at/all")
    result = redraft("init", "chat", "--kind", kind, "--host", host, "--prompts", str(prompts))
    assert result.exit_code == 1
    assert f"cannot serve a {kind} drafter" in result.stderr
    assert "use causal_lm" in result.stderr
    assert registry.drafters() == []


def test_a_kind_that_the_host_serves_is_made_for_it(redraft: Run, registry: Registry, prompts: Path) -> None:
    assert redraft("init", "chat", *SMALL, "--host", "vllm", "--prompts", str(prompts)).exit_code == 0
    medusa = redraft("init", "heads", *SMALL, "--kind", "medusa", "--host", "reference", "--prompts", str(prompts))
    assert medusa.exit_code == 0
    assert {d.kind for d in registry.drafters()} == {"causal_lm", "medusa"}


def test_a_host_that_there_is_none_of_is_refused(redraft: Run, prompts: Path) -> None:
    result = redraft("init", "chat", *SMALL, "--host", "tgi", "--prompts", str(prompts))
    assert result.exit_code == 1
    assert "there is no host 'tgi'" in result.stderr


def test_ngrams_are_no_drafter_to_make_and_the_answer_says_which_settings_turn_them_on(
    redraft: Run, registry: Registry, prompts: Path
) -> None:
    result = redraft("init", "chat", "--kind", "ngram", "--prompts", str(prompts))
    assert result.exit_code == 1
    assert "no weights" in result.stderr
    assert "REDRAFT_FALLBACK=ngram" in result.stderr
    assert "REDRAFT_NGRAM_FIRST=true" in result.stderr
    assert registry.drafters() == []


def test_a_checkpoint_with_another_tokenizer_is_refused(
    redraft: Run, registry: Registry, prompts: Path, tmp_path: Path
) -> None:
    checkpoint = tiny_target_dir(tmp_path / "other", layers=1)
    tiny_tokenizer(vocab_size=300).save_pretrained(checkpoint)
    result = redraft("init", "chat", "--checkpoint", str(checkpoint), "--prompts", str(prompts))
    assert result.exit_code == 1
    assert "another tokenizer" in result.stderr
    assert registry.drafters() == []


def test_a_name_is_refused_before_the_target_is_asked(
    redraft: Run, registry: Registry, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    redraft("init", "chat", *SMALL, "--prompts", str(prompts))
    monkeypatch.setenv("REDRAFT_TARGET", "/nowhere/at/all")
    result = redraft("init", "chat")
    assert result.exit_code == 1
    assert "'chat' already" in result.stderr
    assert [d.name for d in registry.drafters()] == ["chat"]


def test_more_layers_than_the_target_has_are_refused(redraft: Run, registry: Registry, prompts: Path) -> None:
    result = redraft("init", "chat", "--layers", "9", "--prompts", str(prompts))
    assert result.exit_code == 1
    assert "ask for 1 to 3" in result.stderr
    assert registry.drafters() == []


def test_a_first_init_makes_the_embedded_database(redraft: Run, home: Path, prompts: Path) -> None:
    (home / "redraft.db").unlink()
    assert redraft("init", "chat", *SMALL, "--prompts", str(prompts)).exit_code == 0
    assert json.loads(redraft("versions", "--json").stdout)[0]["state"] == "live"


def test_the_prompts_that_come_along_are_some_forty_of_four_kinds() -> None:
    lines = [json.loads(line) for line in SAMPLE_PROMPTS.read_text(encoding="utf-8").splitlines()]
    assert {line["workload"] for line in lines} == {"chat", "code", "maths", "summary"}
    assert len(set(read_prompts(SAMPLE_PROMPTS))) == len(lines) == 40


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ('{"prompt": "a"}\n{"text": "b"}\n', "line 2"),
        ('{"prompt": 3}\n', "no text"),
        ("[1]\n", "line 1"),
        ("Hello\n", "line 1"),
        ("\n", "no prompts"),
    ],
)
def test_a_file_of_prompts_that_cannot_be_used_is_refused_by_its_line(content: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(content)
    with pytest.raises(CommandError, match=says):
        read_prompts(path)


def test_a_file_of_prompts_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="nowhere"):
        read_prompts(tmp_path / "nowhere")


@pytest.mark.parametrize("kind", ["medusa", "mtp", "eagle", "streaming"])
def test_every_kind_of_drafter_is_made_and_warmed_up(
    redraft: Run, registry: Registry, store: WeightsStore, target: Target, prompts: Path, kind: str
) -> None:
    sizes = ("--kind", kind, "--depths", "2", "--draft-vocab", "48", "--prompts", str(prompts))
    result = redraft("init", "cold", *sizes)
    assert result.exit_code == 0, result.stderr
    assert f"version 1 is live ({kind}, " in result.stdout
    assert registry.drafter("cold").kind == kind
    loaded = made(registry, store, target, "cold")
    assert (loaded.kind, loaded.depths, loaded.config.draft_vocab) == (kind, 2, 48)
    assert "warm-up:" in redraft("init", "warm", *sizes, "--warm-up").stdout
    assert registry.live("cold").weights_sha256 != registry.live("warm").weights_sha256
    made(registry, store, target, "warm")


def test_the_sizes_of_streams_are_settings_and_bad_ones_are_refused_with_the_reason(
    redraft: Run, registry: Registry, prompts: Path
) -> None:
    sizes = ("--kind", "streaming", "--draft-vocab", "48", "--prompts", str(prompts))
    made = redraft("init", "cold", *sizes, "--layers", "1", "--rank", "2", "--depths", "3", "--passes", "1")
    assert "(streaming, 3 streams in the last 1 layers, rank 2, 1 passes a round, 48 draft tokens" in made.stdout
    refused = redraft("init", "deep", *sizes, "--layers", "9")
    assert refused.exit_code != 0
    assert "streams in 9 layers of a target of 3: ask for 1 to 3" in refused.stderr
    assert [drafter.name for drafter in registry.drafters()] == ["cold"]


def test_a_kind_that_there_is_not_and_a_checkpoint_for_another_kind_are_refused(
    redraft: Run, prompts: Path, tmp_path: Path
) -> None:
    unknown = redraft("init", "chat", "--kind", "hydra", "--prompts", str(prompts))
    assert unknown.exit_code == 1
    assert "no kind 'hydra': use causal_lm, medusa, mtp, eagle" in unknown.stderr
    refused = redraft("init", "chat", "--kind", "medusa", "--checkpoint", str(tmp_path))
    assert refused.exit_code == 1
    assert "--checkpoint is for causal_lm" in refused.stderr
