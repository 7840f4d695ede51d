"""One hundred real prompts of two workloads: of the shared folder where it is there, else HumanEval and docstrings."""

import json
from pathlib import Path

from cli.demo.prompts import workloads
from tests.live.vllm.rig import Prompt
from tests.test_packages import CHECKOUT

SHARED = CHECKOUT.parent / "shared" / "data"
FILES = ("humaneval_code", "spider_sql")


def prompts(count: int = 100) -> list[Prompt]:
    """Half of each workload, in turns, so that each is served all the time."""
    each = count // 2
    if all((SHARED / f"{name}.jsonl").is_file() for name in FILES):
        parts = [[Prompt(name, text) for text in _texts(SHARED / f"{name}.jsonl", each)] for name in FILES]
    else:
        parts = [[Prompt(part.name, text) for text in part.traffic] for part in workloads(count, 0)]
    return [prompt for pair in zip(*parts, strict=True) for prompt in pair]


def _texts(file: Path, count: int) -> list[str]:
    """Spread over the file, which is grouped by subject."""
    rows = [json.loads(line)["prompt"] for line in file.read_text().splitlines()]
    return [rows[at * len(rows) // count] for at in range(count)]
