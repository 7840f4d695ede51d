"""`redraft bench` as a command: its files and tables, and what it refuses before anything slow."""

import json
from pathlib import Path

import pytest

from adapter.target import Target
from cli.bench import numbers
from cli.output import CommandError
from storage.registry import Registry
from storage.weights import WeightsStore
from tests.cli.conftest import Run
from tests.cli.test_serve import make_version_1

DECODE = ("bench", "decode", "--k", "2", "--temperature", "0", "--requests", "2", "--max-tokens", "8", "--repeats", "1")


@pytest.fixture(autouse=True)
def prompts(home: Path, target_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Settings for the tiny target, and a workload."""
    for name, value in {"TARGET": target_dir, "CACHE": target_dir / "cache", "DTYPE": "fp32", "DEVICE": "cpu"}.items():
        monkeypatch.setenv(f"REDRAFT_{name}", str(value))
    path = tmp_path / "code.jsonl"
    lines = ("select name from city", "Hello, world!", "def add(first, second):", "How are you today?")
    path.write_text("".join(json.dumps({"id": i, "prompt": line}) + "\n" for i, line in enumerate(lines)))
    return path


@pytest.fixture
def version_1(target: Target, registry: Registry, store: WeightsStore) -> None:
    make_version_1(target, registry, store)


@pytest.mark.usefixtures("version_1")
def test_decode_prints_the_table_and_writes_both_files(redraft: Run, prompts: Path, tmp_path: Path) -> None:
    out, page = tmp_path / "new" / "out.json", tmp_path / "page.html"
    files = ("--workload", str(prompts), "--json", str(out), "--html", str(page))
    result = redraft(*DECODE, *files, "--batch", "1,2")
    assert result.exit_code == 0, result.stderr
    assert "code, temperature 0, batch 2" in result.stdout
    written = json.loads(out.read_text())
    assert (written["settings"]["drafter"], written["settings"]["version"]) == ("chat", 1)
    assert {row["arm"] for row in written["rows"]} == {"plain", "speculative", "governed", "hf_plain", "hf_assisted"}
    assert {row["workload"] for row in written["rows"]} == {"code"}
    assert page.read_text().startswith("<!doctype html>")


@pytest.mark.usefixtures("version_1")
def test_random_weights_are_a_useless_drafter(redraft: Run, prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    result = redraft(*DECODE, "--workload", str(prompts), "--batch", "1", "--json", str(out), "--random-weights")
    assert result.exit_code == 0, result.stderr
    written = json.loads(out.read_text())
    assert written["settings"]["random_weights"] is True
    (row,) = (row for row in written["rows"] if row["arm"] == "speculative")
    assert row["acceptance_rate"] < 0.3
    assert (row["identical"], row["different"]) == (2, 0)


def test_without_a_drafter_it_says_how_to_make_one(redraft: Run, prompts: Path) -> None:
    result = redraft(*DECODE, "--workload", str(prompts), "--batch", "1")
    assert result.exit_code == 1
    assert result.stderr == "error: there is no drafter for this target: run `redraft init NAME` to make one\n"


@pytest.mark.usefixtures("version_1")
def test_a_version_that_is_not_there_is_named(redraft: Run, prompts: Path) -> None:
    result = redraft(*DECODE, "--workload", str(prompts), "--batch", "1", "--version", "9")
    assert result.exit_code == 1
    assert "chat has no version 9" in result.stderr


def test_a_batch_that_cannot_be_filled_is_refused(redraft: Run, prompts: Path) -> None:
    result = redraft(*DECODE, "--workload", str(prompts), "--batch", "1,4")
    assert result.exit_code == 1
    assert "--requests 2 does not fill a batch of 4" in result.stderr


@pytest.mark.usefixtures("version_1")
def test_several_workloads_may_follow_one_option(redraft: Run, prompts: Path, tmp_path: Path) -> None:
    other, out = prompts.with_name("chat.jsonl"), tmp_path / "out.json"
    other.write_text(prompts.read_text())
    files = ("--workload", str(prompts), str(other), "--json", str(out))
    result = redraft(*DECODE, *files, "--batch", "1")
    assert result.exit_code == 0, result.stderr
    assert {row["workload"] for row in json.loads(out.read_text())["rows"]} == {"code", "chat"}


def test_two_workloads_of_one_name_are_refused(redraft: Run, prompts: Path) -> None:
    result = redraft(*DECODE, "--workload", str(prompts), "--workload", str(prompts), "--batch", "1")
    assert result.exit_code == 1
    assert "one name" in result.stderr


@pytest.mark.usefixtures("version_1")
def test_a_workload_with_too_few_prompts_is_named(redraft: Run, prompts: Path) -> None:
    result = redraft(*DECODE[:7], "5", *DECODE[8:], "--workload", str(prompts), "--batch", "1")
    assert result.exit_code == 1
    assert "workload code has 4 prompts" in result.stderr


def test_numbers_are_read_once_each_and_bad_ones_named() -> None:
    assert numbers("--k", "1,2,2, 4", int, 1) == (1, 2, 4)
    assert numbers("--temperature", "0,0.8", float, 0.0) == (0.0, 0.8)
    with pytest.raises(CommandError, match="--k '1,x': 'x' is no number"):
        numbers("--k", "1,x", int, 1)
    with pytest.raises(CommandError, match="--k '0': 0 is below 1"):
        numbers("--k", "0", int, 1)
    with pytest.raises(CommandError, match="below"):
        numbers("--temperature", "nan", float, 0.0)


@pytest.mark.usefixtures("version_1")
def test_feedback_is_measured_on_a_valkey_of_its_own(redraft: Run, prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    asked = ("--batch", "1", "--requests", "2", "--max-tokens", "8", "--repeats", "2", "--json", str(out))
    result = redraft("bench", "feedback", "--workload", str(prompts), *asked)
    assert result.exit_code == 0, result.stderr
    assert "feedback on against off" in result.stdout
    (row,) = json.loads(out.read_text())["rows"]
    assert row["ratio"] > 0


@pytest.mark.usefixtures("version_1")
def test_soak_starts_a_server_of_its_own_and_ends_it(redraft: Run, prompts: Path, tmp_path: Path, home: Path) -> None:
    out = tmp_path / "out.json"
    asked = ("--clients", "16", "--seconds", "4", "--max-tokens", "12", "--prompts", str(prompts), "--json", str(out))
    result = redraft("bench", "soak", *asked)
    assert result.exit_code == 0, result.stderr
    written = json.loads(out.read_text())
    assert written["failed"] == written["stuck_slots"] == 0
    assert written["memory"]["start"] > 50
    assert "resident memory" in result.stdout
    assert "serving on" in (home / "logs" / "bench.log").read_text()


def test_soak_of_a_server_that_does_not_start_says_why(redraft: Run, prompts: Path, home: Path) -> None:
    (home / "redraft.db").unlink()
    result = redraft("bench", "soak", "--clients", "2", "--seconds", "1", "--prompts", str(prompts))
    assert result.exit_code == 1
    assert "the server did not start: error: the database is at revision none" in result.stderr


def test_soak_takes_plain_http_alone(redraft: Run, prompts: Path) -> None:
    result = redraft("bench", "soak", "--url", "https://example.org", "--prompts", str(prompts))
    assert result.exit_code == 1
    assert "only http://" in result.stderr
