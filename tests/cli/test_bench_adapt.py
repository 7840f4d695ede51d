"""`redraft bench adapt` and `grid` as commands: their tables and files, and what they refuse before anything slow."""

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Run

SHORT = ("--requests", "8", "--held-out", "2", "--max-tokens", "8", "--window", "3")


@pytest.fixture(autouse=True)
def workloads(home: Path, target_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Settings for the tiny target and small windows, and two workloads."""
    values = {"TARGET": target_dir, "CACHE": tmp_path / "cache", "DTYPE": "fp32", "DEVICE": "cpu"}
    values |= {"WINDOW_RECORDS": 8, "WINDOW_MINIMUM": 4, "EPOCHS": 1}
    for name, value in values.items():
        monkeypatch.setenv(f"REDRAFT_{name}", str(value))
    paths = [tmp_path / "code.jsonl", tmp_path / "sql.jsonl"]
    for path in paths:
        lines = (json.dumps({"prompt": f"{path.stem} {i} and {i + 1}"}) for i in range(12))
        path.write_text("\n".join(lines))
    return [str(path) for path in paths]


def test_adapt_prints_a_table_for_each_workload_and_writes_both_files(
    redraft: Run, workloads: list[str], tmp_path: Path
) -> None:
    out, png = tmp_path / "new" / "out.json", tmp_path / "new" / "curve.png"
    result = redraft("bench", "adapt", "--workload", *workloads, *SHORT, "--json", str(out), "--png", str(png))
    assert result.exit_code == 0, result.stderr
    assert "code: 8 requests of traffic, 2 held out" in result.stdout
    assert "to 90 %" in result.stdout
    written = json.loads(out.read_text())
    assert [(row["arm"], row["workload"]) for row in written["rows"]] == [
        (arm, workload) for arm in ("frozen", "osd", "redraft", "offline") for workload in ("code", "sql")
    ]
    assert {"arm", "workload", "ceiling", "start", "end", "requests_to_90", "forgotten", "curve"} <= written["rows"][
        0
    ].keys()
    assert written["settings"]["warm_start"] is True
    assert png.read_bytes().startswith(b"\x89PNG")
    assert len(list((tmp_path / "cache" / "bench").iterdir())) == 3


def test_grid_names_the_winner(redraft: Run, workloads: list[str], tmp_path: Path) -> None:
    out = tmp_path / "grid.json"
    asked = ("--losses", "forward_kl, jsd", *SHORT[:6], "--no-warm-start", "--json", str(out))
    result = redraft("bench", "grid", "--workload", workloads[0], *asked)
    assert result.exit_code == 0, result.stderr
    written = json.loads(out.read_text())
    assert len(written["rows"]) == 2 * 2
    assert f"best over all workloads: {written['winners']['all']}" in result.stdout


@pytest.mark.parametrize(
    ("command", "option", "told"),
    [
        ("adapt", ("--arms", "frozen,fast"), "'fast' is no arm: use frozen, osd, osd_tuned, redraft, offline"),
        ("grid", ("--losses", "huber"), "--losses: 'huber' is none of forward_kl"),
        ("grid", ("--positions", "all"), "--positions: 'all' is none of rejected, verified"),
        ("adapt", ("--requests", "12"), "workload code has 12 prompts"),
    ],
)
def test_what_cannot_be_measured_is_said(
    redraft: Run, workloads: list[str], command: str, option: tuple[str, str], told: str
) -> None:
    result = redraft("bench", command, "--workload", workloads[0], *option)
    assert result.exit_code == 1
    assert told in result.stderr
