"""What the proposer's feedback costs vLLM: one server, feedback off and on in turn.

    REDRAFT_VLLM=.../bin/python python -m tests.live.vllm.overhead [PAIRS] [REQUESTS]

A run sends the same prompts four at a time at temperature 0, with version 1, which is accepted seldom: the most rounds
a token. Two figures: until the last answer, which is vLLM's throughput, and until the last record is in Redis as well,
which a long run hardly differs in. The first of a pair changes from pair to pair.
"""

import json
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from tests.live.vllm.prompts import prompts
from tests.live.vllm.rig import AT_ONCE, SPECULATION, Prompt, Server, Stack, serving, stack
from tests.live.vllm.switched import OFF

SWITCHED = {**SPECULATION, "model": "tests.live.vllm.switched.Switched"}


def speed(server: Server, beside: Stack, asked: list[Prompt], on: bool) -> tuple[float, float]:
    """Tokens per second of one run: until it was answered, and until its feedback was written."""
    switch = beside.home / OFF
    switch.unlink(missing_ok=True) if on else switch.touch()
    before = beside.written()
    began = time.perf_counter()
    tokens = sum(len(answer.tokens) for answer in server.ask_all(asked))
    answered = time.perf_counter() - began
    while on and beside.written() < before + len(asked):
        time.sleep(0.01)
    return tokens / answered, tokens / (time.perf_counter() - began)


def main(pairs: int = 10, requests: int = 24) -> None:
    asked = prompts(requests)
    found: list[dict[bool, tuple[float, float]]] = []
    with (
        tempfile.TemporaryDirectory(prefix="rd") as folder,
        stack(Path(folder)) as beside,
        serving(beside, "overhead", True, speculation=SWITCHED) as server,
    ):
        for pair in range(-1, pairs):  # the first one warms up
            order = (True, False) if pair % 2 else (False, True)
            speeds = {on: speed(server, beside, asked, on) for on in order}
            if pair >= 0:
                found.append(speeds)
            print(json.dumps({"pair": pair, "on": speeds[True], "off": speeds[False]}), flush=True)  # noqa: T201
    report: dict[str, float] = {"requests_a_run": requests, "at_once": AT_ONCE, "pairs": len(found)}
    for at, until in enumerate(("answered", "written")):
        on, off = [pair[True][at] for pair in found], [pair[False][at] for pair in found]
        report[f"tokens_per_second_on_until_{until}"] = median(on)
        report[f"tokens_per_second_off_until_{until}"] = median(off)
        report[f"ratio_of_medians_until_{until}"] = median(on) / median(off)
        report[f"median_of_paired_ratios_until_{until}"] = median(a / b for a, b in zip(on, off, strict=True))
    print(json.dumps(report, indent=2))  # noqa: T201


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
