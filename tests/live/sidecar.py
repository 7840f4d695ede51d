"""The sidecar before a real vLLM: its client's bytes, and its rejection positions against those that the proposer
inside vLLM records, request by request.

Run by `make test-vllm`, not by `make test`; some six minutes. The drafter is the target itself with noise in its
weights, which is accepted now and then. First redraft's proposer runs it inside vLLM, with the sidecar before that
server: two records of each request. Then vLLM runs it itself, as a `draft_model`, and the sidecar alone records the
same prompts.
"""

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
import structlog
import torch
from safetensors.torch import load_file, save_file

from storage.records import FeedbackRecord, decode
from storage.redis_clients import consume
from storage.validation import validate
from tests.live.vllm.prompts import prompts
from tests.live.vllm.rig import DRAFTER, MODEL, K, Stack, serving, stack, target_folder
from tests.service.hosts.sidecar.rig import told
from tests.test_packages import CHECKOUT

NOISY = f"{DRAFTER}-noisy"
NOISE = 0.06  # of a matrix' own spread
PROMPTS = [prompt.text for prompt in prompts(24)]
LENGTHS = (40, 17, 33)  # tokens of an answer; 17 cuts a step short now and then
Rounds = list[tuple[int, int, int]]  # start, proposed, accepted
log = structlog.get_logger()


@pytest.fixture(scope="module")
def beside(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """redraft with the noisy drafter instead of the rig's own."""
    with stack(tmp_path_factory.mktemp("redraft")) as made:
        noisy = _noisy(target_folder(made.environ), made.home / "noisy")
        made.environ["REDRAFT_DRAFTER"] = NOISY
        made.redraft("init", NOISY, "--checkpoint", str(noisy))
        yield made


def _noisy(target: Path, folder: Path) -> Path:
    shutil.copytree(target, folder, ignore=shutil.ignore_patterns("redraft.json", "*.safetensors"))
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, tensor in load_file(target / "model.safetensors").items():
        values = tensor.float()
        if tensor.ndim == 2 and "embed" not in name:
            values = values + torch.randn(values.shape, generator=generator) * values.std() * NOISE
        tensors[name] = values.to(tensor.dtype)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@contextmanager
def sidecar(beside: Stack, engine: str) -> Iterator[str]:
    """Every request observed."""
    port = 18_700
    own = {"REDRAFT_SIDECAR_SHARE": "1", "REDRAFT_SIDECAR_PORT": str(port), "REDRAFT_ENGINE_LOSSLESS": "yes"}
    environ = {**beside.environ, **own}
    with (beside.home / "sidecar.log").open("ab") as output:
        command = [sys.executable, "-m", "cli", "sidecar", engine]
        process = subprocess.Popen(command, env=environ, cwd=CHECKOUT, stdout=output, stderr=output)
    try:
        address = f"http://127.0.0.1:{port}"
        _until(lambda: _observes(address), 120)
        yield address
    finally:
        process.terminate()
        process.wait(30)


def _observes(address: str) -> bool:
    try:
        with urlopen(f"{address}/redraft/health", timeout=5) as answer:
            told = json.load(answer)
    except OSError:
        return False
    return bool(told["observing"] and told["version"] == 1)


def _until(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.3)


def _body(number: int) -> tuple[str, dict[str, Any]]:
    """Each prompt in another form."""
    text, chat = PROMPTS[number], number % 2 == 0
    template = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"  # without it the model ends at once
    said: dict[str, Any] = {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": template}
    body = {"model": MODEL, **said, "max_tokens": LENGTHS[number % 3], "temperature": 0}
    if number % 4 >= 2:
        body["stream"] = True
    if number % 8 >= 6:
        body["stream_options"] = {"include_usage": True}
    return ("/v1/chat/completions" if chat else "/v1/completions"), body


def _sent(address: str, number: int) -> tuple[int, dict[str, str], bytes]:
    path, body = _body(number)
    return told(address, path, body, seconds=300)


def _records(beside: Stack, source: str) -> dict[tuple[bytes, bytes], FeedbackRecord]:
    """By prompt and output; of two sendings of one prompt any, as they are equal."""
    redis = consume(beside.storage.stream_url)
    try:
        entries: Any = redis.xrange(f"redraft:{NOISY}:feedback")
        found = [decode(next(iter(fields.values()))) for _, fields in entries]
    finally:
        redis.close()
    return {(one.prompt_ids, one.output_ids): one for one in found if one.source == source}


def _rounds(record: FeedbackRecord) -> Rounds:
    return [(r.start, r.proposed, r.accepted) for r in record.rounds]


def _refused(record: FeedbackRecord) -> list[int]:
    return [r.start + r.accepted for r in record.rounds if r.accepted < r.proposed]


@pytest.fixture(scope="module")
def inside(beside: Stack) -> dict[tuple[bytes, bytes], FeedbackRecord]:
    """With the proposer inside vLLM and the sidecar before it."""
    with serving(beside, "proposer", True) as server, sidecar(beside, server.url) as address:
        _until(lambda: "live.applied" in server.log.read_text(errors="replace"), 60)
        for number in range(len(PROMPTS)):
            assert _sent(address, number)[0] == 200
        _until(lambda: len(_records(beside, "sidecar")) >= len(PROMPTS) - 2, 30)
    return _records(beside, "vllm")


def test_rounds_equal_those_that_the_proposer_recorded_wherever_they_are_exact(
    beside: Stack, inside: dict[tuple[bytes, bytes], FeedbackRecord]
) -> None:
    reconstructed = _records(beside, "sidecar")
    pairs = [(record, inside[key]) for key, record in reconstructed.items() if key in inside]
    exact = [(mine, its) for mine, its in pairs if mine.positions.startswith("exact")]
    rounds = sum(len(mine.rounds) for mine, _ in exact)
    refusals = sum(len(_refused(mine)) for mine, _ in exact)
    accepted = sum(r.accepted for mine, _ in exact for r in mine.rounds)
    grades = {
        grade: sum(mine.positions == grade for mine, _ in pairs) for grade in ("exact", "exact_truncated", "approx")
    }
    equal = sum(_rounds(mine) == _rounds(its) for mine, its in pairs)
    log.info(
        "measured", requests=len(pairs), equal=equal, grades=grades, rounds=rounds, refusals=refusals, accepted=accepted
    )
    assert len(pairs) >= len(PROMPTS) - 2
    assert len(exact) >= len(pairs) // 2
    assert accepted > 50
    assert [_rounds(mine) for mine, _ in exact] == [_rounds(its) for _, its in exact]
    for record in reconstructed.values():
        validate(record, 49_152)


def test_the_same_drafter_as_a_draft_model_is_observed_byte_for_byte(
    beside: Stack, inside: dict[tuple[bytes, bytes], FeedbackRecord]
) -> None:
    """Plain bytes without the sidecar, the same with it; and the positions of the proposer, near-ties apart.

    The proposer's drafter and vLLM's own run of it are two programs in bf16: where two tokens are as good as equal to
    the drafter they may propose different ones. vLLM keeps no prefixes here: a prompt of which it has read a part
    before is a pass of another width, and rounds differently.
    """
    folder = beside.home / "draft"
    beside.redraft("export", "1", "--to", str(folder))
    (checkpoint,) = {path.parent for path in folder.rglob("config.json")}
    speculation = {"method": "draft_model", "model": str(checkpoint), "num_speculative_tokens": K}
    before = set(_records(beside, "sidecar"))
    differing = []
    with (
        serving(beside, "draft_model", True, speculation=speculation, more=["--no-enable-prefix-caching"]) as server,
        sidecar(beside, server.url) as address,
    ):
        began = time.time()
        for number in range(len(PROMPTS)):
            direct, through = _sent(server.url, number), _sent(address, number)
            if direct != through:
                differing.append((number, direct, through))
        _until(lambda: len([r for r in _records(beside, "sidecar").values() if r.finished_at > began]) >= 20, 30)
    found = {key: r for key, r in _records(beside, "sidecar").items() if r.finished_at > began}
    exact = [(r, inside[key]) for key, r in found.items() if key in inside and r.positions.startswith("exact")]
    same = sum(_refused(mine) == _refused(its) for mine, its in exact)
    log.info("measured", sent=len(PROMPTS), differing=len(differing), compared=len(exact), same_positions=same)
    assert before
    assert not differing, differing[0]
    assert len(exact) >= 10
    assert same >= 0.8 * len(exact)
