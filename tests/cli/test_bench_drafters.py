"""`redraft bench drafters` as a command: its table, sentences and files, and what it refuses before anything slow."""

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Run

SHORT = ("--requests", "4", "--unseen", "2", "--max-tokens", "8", "--repeats", "1", "--k", "2", "--nodes", "6")


@pytest.fixture(autouse=True)
def workloads(home: Path, target_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Settings for the tiny target, and two workloads."""
    values = {"TARGET": target_dir, "CACHE": tmp_path / "cache", "DTYPE": "fp32", "DEVICE": "cpu", "EPOCHS": 1}
    for name, value in values.items():
        monkeypatch.setenv(f"REDRAFT_{name}", str(value))
    paths = [tmp_path / "code.jsonl", tmp_path / "sql.jsonl"]
    for path in paths:
        lines = (json.dumps({"prompt": f"{path.stem} {i} and {i + 1}"}) for i in range(8))
        path.write_text("\n".join(lines))
    return [str(path) for path in paths]


def test_it_says_what_it_will_do_and_prints_and_writes_what_it_found(
    redraft: Run, workloads: list[str], tmp_path: Path
) -> None:
    out, html = tmp_path / "new" / "out.json", tmp_path / "new" / "page.html"
    asked = ("--kinds", "medusa, ngram", "--passes", "2", *SHORT, "--json", str(out), "--html", str(html))
    result = redraft("bench", "drafters", "--workload", *workloads, *asked)
    assert result.exit_code == 0, result.stderr
    first = result.stdout.splitlines()[0]
    assert first.startswith("medusa, ngram on code, sql: each learns from 4 records of a workload in 2 passes; then 9")
    assert "288 tokens in all" in first
    assert "times the accepted progress of plain decoding" in result.stdout
    written = json.loads(out.read_text())
    assert [(row["workload"], row["kind"], row["shape"]) for row in written["rows"]] == [
        (workload, kind, shape)
        for workload in ("code", "sql")
        for kind in ("medusa", "ngram")
        for shape in ("chain", "tree", "governed", "combined")
    ]
    assert {row["identical"] for row in written["rows"]} == {2}
    assert written["settings"]["kinds"] == ["medusa", "ngram"]
    assert (written["learning"]["epochs"], written["learning"]["positions"]) == (2, "verified")
    assert html.read_text().startswith("<!doctype html>")


def test_without_trees_and_from_a_warmed_up_version(redraft: Run, workloads: list[str], tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    asked = (*SHORT[:8], "--nodes", "0", "--kinds", "mtp", "--warm-start", "--together", "--json", str(out))
    result = redraft("bench", "drafters", "--workload", *workloads, *asked)
    assert result.exit_code == 0, result.stderr
    assert "warm-up:" in result.stdout
    written = json.loads(out.read_text())
    assert {(row["kind"], row["shape"], row["training_records"]) for row in written["rows"]} == {
        ("mtp", "chain", 8),
        ("mtp", "governed", 8),
    }


@pytest.mark.parametrize(
    ("option", "told"),
    [
        (("--kinds", "medusa,fast"), "--kinds: 'fast' is none of causal_lm, medusa, mtp, eagle"),
        (("--k", "4", "--nodes", "4"), "--nodes 4 is no tree of depth 4"),
        (("--k", "1", "--nodes", "4"), "--k 1 leaves nothing for a tree to grow from"),
        (("--unseen", "2", "--batch", "4"), "2 prompts to decode do not fill a batch of 4"),
        (("--unseen", "2", "--decoded", "3"), "--decoded 3 is more than --unseen 2"),
        (("--requests", "8"), "workload code has 8 prompts"),
    ],
)
def test_what_cannot_be_measured_is_said(
    redraft: Run, workloads: list[str], option: tuple[str, ...], told: str
) -> None:
    result = redraft("bench", "drafters", "--workload", workloads[0], *option)
    assert result.exit_code == 1
    assert told in result.stderr
