"""What the proposer's feedback costs vLLM: one server, feedback off and on in turn.

    REDRAFT_VLLM=.../bin/python python -m tests.live.vllm.overhead [PAIRS] [REQUESTS]

A run sends the same prompts four at a time at temperature 0, with version 1, which is accepted seldom: the most rounds
a token. With feedback a run ends when its last record is in Redis. The first of a pair changes from pair to pair.
"""

import json
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from tests.live.vllm import rig
from tests.live.vllm.prompts import prompts
from tests.live.vllm.rig import AT_ONCE, SPECULATION, Prompt, Server, Stack, serving, stack
from tests.live.vllm.switched import OFF

SWITCHED = {**SPECULATION, "model": "tests.live.vllm.switched.Switched"}


def speed(server: Server, beside: Stack, asked: list[Prompt], on: bool) -> float:
    """Tokens per second of one run."""
    switch = beside.home / OFF
    switch.unlink(missing_ok=True) if on else switch.touch()
    before, began = beside.written(), time.perf_counter()
    tokens = sum(len(answer.tokens) for answer in server.ask_all(asked))
    while on and beside.written() < before + len(asked):
        time.sleep(0.01)
    return tokens / (time.perf_counter() - began)


def main(pairs: int = 10, requests: int = 24) -> None:
    asked = prompts(requests)
    rig.SPECULATION = SWITCHED
    found: list[tuple[float, float]] = []
    with (
        tempfile.TemporaryDirectory(prefix="rd") as folder,
        stack(Path(folder)) as beside,
        serving(beside, "overhead", True) as server,
    ):
        for pair in range(-1, pairs):  # the first one warms up
            order = (True, False) if pair % 2 else (False, True)
            speeds = {on: speed(server, beside, asked, on) for on in order}
            if pair >= 0:
                found.append((speeds[True], speeds[False]))
            print(json.dumps({"pair": pair, "on": speeds[True], "off": speeds[False]}), flush=True)  # noqa: T201
    report = {
        "requests_a_run": requests, "at_once": AT_ONCE, "pairs": len(found),
        "tokens_per_second_on": median(on for on, _ in found),
        "tokens_per_second_off": median(off for _, off in found),
        "ratio_of_medians": median(on for on, _ in found) / median(off for _, off in found),
        "median_of_paired_ratios": median(on / off for on, off in found),
    }  # fmt: skip
    print(json.dumps(report, indent=2))  # noqa: T201


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
