"""What the proposer's feedback costs vLLM: one server, feedback off and on in turn.

    REDRAFT_VLLM=.../bin/python python -m tests.live.vllm.overhead [PAIRS] [REQUESTS]

A run sends the same prompts four at a time at temperature 0, with version 1, which is accepted seldom: the most rounds
a token. Two speeds: until the last answer, which is vLLM's throughput, and until the last record is in Redis as well,
which a long run hardly differs in. The first of a pair changes from pair to pair. And the share of the worker's
processor time that feedback takes itself while it is on, for machines that are too busy for speeds to say anything.
"""

import json
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from tests.live.vllm.prompts import prompts
from tests.live.vllm.rig import AT_ONCE, SPECULATION, Prompt, Server, Stack, serving, stack
from tests.live.vllm.switched import OFF, SPENT

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


def spent(beside: Stack) -> tuple[float, float]:
    """Seconds of processor time until the last request's end: of feedback, and of all of vLLM's worker."""
    file = beside.home / SPENT
    own, all_of_it = json.loads(file.read_text()) if file.is_file() else (0.0, 0.0)
    return own, all_of_it


def share(server: Server, beside: Stack, asked: list[Prompt], on: bool) -> tuple[tuple[float, float], float]:
    """A run's speeds, and feedback's share of its processor time; 0 where it is off."""
    before = spent(beside)
    speeds = speed(server, beside, asked, on)
    own, all_of_it = (now - then for now, then in zip(spent(beside), before, strict=True))
    return speeds, own / all_of_it if on else 0.0


def main(pairs: int = 10, requests: int = 24) -> None:
    asked = prompts(requests)
    found: list[dict[bool, tuple[float, float]]] = []
    shares: list[float] = []
    with (
        tempfile.TemporaryDirectory(prefix="rd") as folder,
        stack(Path(folder)) as beside,
        serving(beside, "overhead", True, speculation=SWITCHED) as server,
    ):
        for pair in range(-1, pairs):  # the first one warms up
            order = (True, False) if pair % 2 else (False, True)
            runs = {on: share(server, beside, asked, on) for on in order}
            speeds = {on: run[0] for on, run in runs.items()}
            if pair >= 0:
                found.append(speeds)
                shares.append(runs[True][1])
            print(json.dumps({"pair": pair, "on": speeds[True], "off": speeds[False]}), flush=True)  # noqa: T201
    print(json.dumps(report(found, shares, requests), indent=2))  # noqa: T201


def report(found: list[dict[bool, tuple[float, float]]], shares: list[float], requests: int) -> dict[str, float]:
    """Medians over the pairs."""
    said: dict[str, float] = {"requests_a_run": requests, "at_once": AT_ONCE, "pairs": len(found)}
    said["feedbacks_share_of_processor_time"] = median(shares)
    for at, until in enumerate(("answered", "written")):
        on, off = [pair[True][at] for pair in found], [pair[False][at] for pair in found]
        said[f"tokens_per_second_on_until_{until}"] = median(on)
        said[f"tokens_per_second_off_until_{until}"] = median(off)
        said[f"ratio_of_medians_until_{until}"] = median(on) / median(off)
        said[f"median_of_paired_ratios_until_{until}"] = median(a / b for a, b in zip(on, off, strict=True))
    return said


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
