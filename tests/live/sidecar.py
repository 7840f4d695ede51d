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
from transformers import AutoModelForCausalLM

from service.engine.audit import ROUNDINGS
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
LENGTHS = (28, 13, 21)  # tokens of an answer; 13 cuts a step short now and then
DTYPE = "float32"  # in bf16 two runs of one drafter round apart too often to tell a fault from a tie
Rounds = list[tuple[int, int, int]]  # start, proposed, accepted
Recorded = dict[tuple[bytes, bytes], FeedbackRecord]  # by prompt and output
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
        _until(lambda: _observes(address), 600)  # its short questions are eight answers
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


def _records(beside: Stack, source: str) -> Recorded:
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
def inside(beside: Stack) -> Recorded:
    """With the proposer inside vLLM and the sidecar before it."""
    with serving(beside, "proposer", True, DTYPE) as server, sidecar(beside, server.url) as address:
        _until(lambda: "live.applied" in server.log.read_text(errors="replace"), 300)
        for number in range(len(PROMPTS)):
            assert _sent(address, number)[0] == 200
        _until(lambda: len(_records(beside, "sidecar")) >= len(PROMPTS) - 2, 60)
    return _records(beside, "vllm")


def test_rounds_equal_those_that_the_proposer_recorded_wherever_they_are_exact(beside: Stack, inside: Recorded) -> None:
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


@pytest.fixture(scope="module")
def draft_model(beside: Stack, inside: Recorded) -> Recorded:
    """What the sidecar recorded before vLLM's own run of the same drafter; each prompt is sent around it as well.

    Raises where the two answers are not the same bytes. vLLM keeps no prefixes here: a prompt of which it has read a
    part before is a pass of another width, and rounds differently.
    """
    folder = beside.home / "draft"
    beside.redraft("export", "1", "--to", str(folder))
    (checkpoint,) = {path.parent for path in folder.rglob("config.json")}
    speculation = {"method": "draft_model", "model": str(checkpoint), "num_speculative_tokens": K}
    with (
        serving(beside, "draft_model", True, DTYPE, speculation, ["--no-enable-prefix-caching"]) as server,
        sidecar(beside, server.url) as address,
    ):
        began = time.time()
        for number in range(len(PROMPTS)):
            direct, through = _sent(server.url, number), _sent(address, number)
            assert direct == through, number
        _until(lambda: len(_since(beside, began)) >= len(PROMPTS) - 2, 60)
    return _since(beside, began)


def _since(beside: Stack, began: float) -> Recorded:
    return {key: record for key, record in _records(beside, "sidecar").items() if record.finished_at > began}


def test_a_draft_models_positions_are_the_proposers_but_where_its_own_logits_are_as_good_as_equal(
    beside: Stack, inside: Recorded, draft_model: Recorded
) -> None:
    """One drafter, run by the proposer in torch and by vLLM itself: what they do not propose alike must be a tie."""
    pairs = [(mine, inside[key]) for key, mine in draft_model.items() if key in inside]
    exact = [(mine, its) for mine, its in pairs if mine.positions.startswith("exact")]
    drafter = AutoModelForCausalLM.from_pretrained(beside.home / "noisy", dtype=torch.float32)
    differing = [_parting(drafter, mine, its) for mine, its in exact if _both(mine) != _both(its)]
    refusals = sum(len(_refused(mine)) for mine, _ in exact)
    log.info("measured", sent=len(PROMPTS), pairs=len(pairs), exact=len(exact), refusals=refusals, partings=differing)
    assert len(exact) >= len(PROMPTS) - 2
    assert all(gap <= bound for gap, bound in differing)


def _both(record: FeedbackRecord) -> Rounds:
    """The rounds without the place of the last token that a limit allows: only vLLM's own run proposes for it."""
    end = len(record.output) - (record.finish_reason == "length")
    rounds = [(r.start, min(r.proposed, end - r.start), min(r.accepted, end - r.start)) for r in record.rounds]
    return [one for one in rounds if one[1] > 0]


def _parting(drafter: Any, mine: FeedbackRecord, its: FeedbackRecord) -> tuple[float, float]:
    """By how much the token that only one of the two proposed first is less likely than the likeliest, in the drafter's
    logits; and how far two passes may round these apart."""
    one, other = next(both for both in zip(_both(mine), _both(its), strict=False) if both[0] != both[1])
    assert one[:2] == other[:2], "the same place and length: only what was accepted differs"
    at = one[0] + min(one[2], other[2])
    with torch.inference_mode():
        before = torch.tensor([[*mine.prompt.tolist(), *mine.output[:at].tolist()]])
        logits = drafter(input_ids=before).logits[0, -1]
    gap, largest = logits.max() - logits[int(mine.output[at])], logits.abs().max()
    return float(gap), ROUNDINGS * torch.finfo(logits.dtype).eps * float(largest)
