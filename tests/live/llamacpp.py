"""llama.cpp for real: its own server out of the `xllamacpp` wheel, behind `redraft sidecar --swap llamacpp`.

`make test-llamacpp` makes an environment for the wheel and runs this; `make test` does not collect it, as its name says
no `test_`. The drafter is trained on the very prompts that are asked: what is shown is that everything is joined up.
"""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest
import torch
from openai import OpenAI
from sqlalchemy import Engine

from adapter.distil import DistilConfig
from adapter.drafters.learnt import LearntDrafter
from adapter.export import gguf
from adapter.sample import answers, chat_prompt
from adapter.target import Target, TargetConfig, fetch, load, load_embedding
from adapter.versions import Versions
from cli.init import SAMPLE_PROMPTS, Plan, first_drafter, read_prompts
from service.hosts.llamacpp.process import Process, ServerFailed
from storage.database import migrate, open_database
from storage.history import by_version, history
from storage.registry import Registry
from storage.servers import Servers
from storage.weights import WeightsStore
from storage.windows import Windows
from tests.adapter.feedback import served
from tests.storage.rows import make_training
from worker.lineage import chosen, gathered, trained

CHECKOUT = Path(__file__).resolve().parents[2]
WHEEL = CHECKOUT / "service" / "hosts" / "llamacpp" / "wheel.py"
PYTHON = os.environ.get("REDRAFT_LIVE_LLAMACPP", "")  # an interpreter that has the wheel
PROMPTS = 10
TOKENS = 40
DRAFT_VOCAB = 2048
NEAR_TIE = 0.1  # of the target's own logits, in fp32: where f16 rounding may decide otherwise
SPECULATING = ["--spec-type", "draft-simple", "--spec-draft-model", "{drafter}", "--spec-draft-n-max", "3"]


@dataclass
class Answer:
    """What a client got."""

    prompt: str
    text: str
    proposed: int
    accepted: int


@dataclass
class Asked:
    """Answers of one stretch."""

    answers: list[Answer] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    @property
    def rate(self) -> float:
        return sum(a.accepted for a in self.answers) / max(sum(a.proposed for a in self.answers), 1)


@dataclass
class Story:
    """All that happened, once for every test."""

    target: Target
    drafter: LearntDrafter  # version 2
    folder: Path
    database: Engine
    plain: Asked
    first: Asked
    during: Asked
    second: Asked
    back: Asked
    servers: list[int]  # llama-servers that ran: under version 1, after the exchange, after the end
    cache: Path


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Story:
    folder = tmp_path_factory.mktemp("llamacpp")
    config = TargetConfig(dtype="fp32", device="cpu", cache=Path(os.environ.get("REDRAFT_CACHE", "~/.cache/redraft")))
    files = fetch(config)
    target, prompts = load(config, files), read_prompts(SAMPLE_PROMPTS)[:PROMPTS]
    gguf.write_target(files, folder / "target.gguf")
    database, second = learnt(folder, target, prompts)
    with llama_server(folder, folder / "target.gguf") as url:
        plain = ask(url, prompts)
    registry, running = Registry(database), []
    with sidecar(folder, database, config.cache) as url:
        first = ask(url, prompts)
        running.append(llama_servers())
        with asking(url, prompts) as during:
            promoted = registry.promote(registry.version("chat", 2), registry.live("chat"), "test", "better")
            wait_for(lambda: applied(database, promoted.generation))
            time.sleep(5)
        wait_for(lambda: llama_servers() == 1)
        running.append(llama_servers())
        again = ask(url, prompts)
        returned = registry.rollback("chat", None, "test", "to see it")
        wait_for(lambda: applied(database, returned.generation))
        back = ask(url, prompts[:4])
        time.sleep(3)  # the counters are read once more
    running.append(llama_servers())
    return Story(target, second, folder, database, plain, first, during, again, back, running, config.cache)


def learnt(folder: Path, target: Target, prompts: list[str]) -> tuple[Engine, LearntDrafter]:
    """A database with version 1, two of the target's layers, and version 2, which learned from the target's answers."""
    database, store = open_database(f"sqlite:///{folder / 'redraft.db'}"), WeightsStore(folder / "weights")
    migrate(database)
    registry, windows = Registry(database), Windows(database, store)
    embedding = load_embedding(target.files)
    versions = Versions(store, target.files, embedding)
    drafter = first_drafter(Plan("chat", 2, DRAFT_VOCAB, None, SAMPLE_PROMPTS, False), target, embedding, prompts)
    blob, files = versions.save(drafter), target.files
    registry.create_drafter(
        "chat", "causal_lm", files.fingerprint, files.tokenizer_fingerprint, drafter.config.to_dict(), blob.sha256,
        blob.size, "test",
    )  # fmt: skip
    said = answers(target, [chat_prompt(target, text) for text in prompts], TOKENS)
    window = windows.keep("chat", tuple(served(drafter, record) for record in said), ())
    assert window is not None
    windows.close(window, "promoted")
    config = DistilConfig(epochs=12, positions="verified", learning_rate=1e-3)
    parent = registry.live("chat")
    names = chosen(parent, window, windows, registry, config)
    made = trained(gathered(names, registry.drafter("chat"), parent, windows, versions), config)
    after = versions.save(made.student)
    registry.add_candidate(parent, after.sha256, after.size, window.id, make_training())
    return database, made.student


@contextmanager
def llama_server(folder: Path, model: Path, drafter: Path = Path()) -> Iterator[str]:
    """One server of the wheel, by its address."""
    options = SPECULATING if drafter.name else []
    command = [PYTHON, str(WHEEL), "-m", str(model), "--port", "{port}", "-c", "2048", *options]
    process = Process(command, drafter, folder)
    process.start()
    try:
        process.wait_healthy(120)
        yield process.url
    finally:
        process.stop()


@contextmanager
def sidecar(folder: Path, database: Engine, cache: Path, *options: str) -> Iterator[str]:
    """`redraft sidecar --swap llamacpp`, when the server that it started speculates with the live version."""
    generation = Registry(database).pointer("chat").generation
    words = [PYTHON, str(WHEEL), "-m", str(folder / "target.gguf"), "--port", "{port}", "-c", "4096", "-np", "2"]
    port = Process([], Path(), folder).port
    environ = {
        **{name: value for name, value in os.environ.items() if name != "REDRAFT_LIVE_LLAMACPP"},
        "REDRAFT_HOME": str(folder),
        "REDRAFT_CACHE": str(cache),
        "REDRAFT_SIDECAR_PORT": str(port),
        "REDRAFT_SIDECAR_SHARE": "1",
        "REDRAFT_SIDECAR_SCRAPE_SECONDS": "1",
        "REDRAFT_LLAMACPP_COMMAND": " ".join([*words, *SPECULATING, *options]),
    }
    command = [sys.executable, "-m", "cli", "sidecar", "http://127.0.0.1:9", "--swap", "llamacpp"]
    with (folder / "sidecar.log").open("wb") as log:
        process = subprocess.Popen(command, cwd=CHECKOUT, env=environ, stdout=log, stderr=log)
    try:
        wait_for(lambda: process.poll() is not None or applied(database, generation))
        assert process.poll() is None
        yield f"http://127.0.0.1:{port}"
    except BaseException:
        sys.stderr.write((folder / "sidecar.log").read_text()[-4000:])
        raise
    finally:
        process.terminate()
        process.wait(60)


def applied(database: Engine, generation: int) -> bool:
    """Whether the sidecar says that it serves what the pointer's `generation` names."""
    return any(server.generation == generation and not server.error for server in Servers(database).live("chat"))


def ask(url: str, prompts: list[str]) -> Asked:
    """One after the other, greedily."""
    asked = Asked()
    for prompt in prompts:
        one(OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120), prompt, asked)
    return asked


def one(client: OpenAI, prompt: str, asked: Asked) -> None:
    try:
        reply = client.chat.completions.create(
            model="any", messages=[{"role": "user", "content": prompt}], temperature=0, max_tokens=TOKENS
        )
        timings: dict[str, Any] = (reply.model_extra or {})["timings"]
        text = reply.choices[0].message.content or ""
        asked.answers.append(Answer(prompt, text, timings.get("draft_n", 0), timings.get("draft_n_accepted", 0)))
    except Exception as error:
        asked.failures.append(f"{type(error).__name__}: {error}")


@contextmanager
def asking(url: str, prompts: list[str]) -> Iterator[Asked]:
    """Two clients that ask without a pause until the block ends."""
    asked, ended = Asked(), threading.Event()

    def client(own: OpenAI) -> None:
        while not ended.is_set():
            for prompt in prompts:
                one(own, prompt, asked)

    clients = [OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120) for _ in range(2)]
    threads = [threading.Thread(target=client, args=(own,)) for own in clients]
    for thread in threads:
        thread.start()
    try:
        yield asked
    finally:
        ended.set()
        for thread in threads:
            thread.join()


def llama_servers() -> int:
    """How many servers of the wheel run on this machine, those of other people's tests left out."""
    mine = 0
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        mine += str(WHEEL) in words and any("llamacpp" in word and "target.gguf" in word for word in words)
    return mine


def wait_for(what: Any, seconds: float = 240) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.2)


@torch.no_grad()
def gap(target: Target, prompt: str, one: str, other: str) -> float:
    """How far apart the target's own logits are where two answers part; 0.0 where they do not."""
    texts = [target.tokenizer.encode(text, add_special_tokens=False) for text in (one, other)]
    parts = next((i for i, (a, b) in enumerate(zip(*texts, strict=False)) if a != b), None)
    if parts is None:
        return 0.0
    context = torch.tensor([[*chat_prompt(target, prompt), *texts[0][:parts]]])
    logits = target.model(input_ids=context).logits[0, -1]
    return float((logits[texts[0][parts]] - logits[texts[1][parts]]).abs())


def departures(story: Story, asked: Asked) -> list[float]:
    """The gaps at which answers part from the plain server's."""
    plain = {answer.prompt: answer.text for answer in story.plain.answers}
    parted = departing(story, asked)
    return [gap(story.target, answer.prompt, plain[answer.prompt], answer.text) for answer in parted]


def departing(story: Story, asked: Asked) -> list[Answer]:
    """The answers that are not the plain server's."""
    plain = {answer.prompt: answer.text for answer in story.plain.answers}
    return [answer for answer in asked.answers if answer.text != plain[answer.prompt]]


def test_no_request_fails_while_one_server_takes_over_from_another(story: Story) -> None:
    for asked in (story.plain, story.first, story.during, story.second, story.back):
        assert asked.failures == []
    assert len(story.during.answers) >= 4


def test_the_new_version_proposes_better_and_a_rollback_brings_the_old_one_back(story: Story) -> None:
    figures = [round(asked.rate, 3) for asked in (story.first, story.second, story.back)]
    counts = [(sum(a.accepted for a in s.answers), sum(a.proposed for a in s.answers)) for s in
              (story.first, story.during, story.second, story.back)]  # fmt: skip
    sys.stdout.write(f"accepted/proposed: version 1, exchange, version 2, version 1 again: {counts}\n")
    assert figures[1] > figures[0] + 0.2
    assert figures[2] < figures[1] - 0.2


def test_greedy_text_is_the_plain_servers_or_parts_from_it_at_a_near_tie(story: Story) -> None:
    gaps = [departures(story, asked) for asked in (story.first, story.during, story.second, story.back)]
    sys.stdout.write(f"answers that part from plain decoding, by their gap: {gaps}\n")
    assert max((gap for one in gaps for gap in one), default=0.0) < NEAR_TIE
    same = [len(asked.answers) - len(one) for asked, one in zip((story.first, story.second), gaps[::2], strict=False)]
    assert min(same) >= PROMPTS // 2


def test_the_old_server_ends_when_its_requests_are_answered_and_none_is_left_at_the_end(story: Story) -> None:
    assert story.servers == [1, 1, 0]


def test_acceptance_is_in_the_history_by_version(story: Story) -> None:
    rows = {row.version: row for row in by_version(story.database, "chat")}
    sys.stdout.write(f"history: {[(v, r.accepted, r.proposed) for v, r in sorted(rows.items())]}\n")
    assert rows[2].acceptance_rate > rows[1].acceptance_rate + 0.2
    assert rows[1].proposed >= sum(answer.proposed for answer in story.first.answers) * 0.9


@torch.no_grad()
def test_the_exported_file_proposes_with_the_drafters_own_q(story: Story) -> None:
    """Served as a model of its own: every token in the draft vocabulary, every probability the drafter's."""
    gguf.write(story.drafter, story.target.files, story.folder / "d.gguf")
    known = set(story.drafter.draft_to_target.tolist())
    apart, tokens = 0.0, 0
    with llama_server(story.folder, story.folder / "d.gguf") as url:
        for answer in story.plain.answers[:4]:
            context = chat_prompt(story.target, answer.prompt)
            body = {"prompt": context, "n_predict": 12, "temperature": 0, "n_probs": 8, "return_tokens": True}
            reply = httpx2.post(f"{url}/completion", json=body, timeout=60).json()
            assert set(reply["tokens"]) <= known
            for step in reply["completion_probabilities"]:
                logits = story.drafter.logits(story.drafter.hidden(torch.tensor([context])))[0, -1]
                q = torch.log_softmax(logits, -1)
                for top in step["top_logprobs"]:
                    assert top["id"] in known
                    own = float(q[story.drafter.target_to_draft[top["id"]]])
                    apart, tokens = max(apart, abs(own - top["logprob"])), tokens + 1
                context = [*context, step["id"]]
    sys.stdout.write(f"{tokens} log-probabilities, at most {apart:.4f} apart\n")
    assert apart < 0.05


def test_a_file_that_is_no_drafter_is_refused_by_llamacpp_and_it_says_so(story: Story) -> None:
    broken = story.folder / "broken.gguf"
    broken.write_bytes((story.folder / "target.gguf").read_bytes()[:4_000_000])
    target = str(story.folder / "target.gguf")
    process = Process([PYTHON, str(WHEEL), "-m", target, "--port", "{port}", *SPECULATING], broken, story.folder)
    process.start()
    try:
        with pytest.raises(ServerFailed, match=r"ended with code|serves without"):
            speculating(process)
    finally:
        process.stop()


def speculating(process: Process) -> None:
    process.wait_healthy(120)
    process.check_speculation()


def test_a_server_that_accepts_what_its_target_would_not_say_is_found_out_and_its_figures_say_so(story: Story) -> None:
    prompts, before = [answer.prompt for answer in story.plain.answers[:4]], lossless(story)
    with sidecar(story.folder, story.database, story.cache, "--spec-synth-len", "3") as url:
        wait_for(lambda: Servers(story.database).live("chat")[0].capabilities is not None)
        asked = ask(url, prompts)
        time.sleep(3)  # the counters are read once more
        (server,) = Servers(story.database).live("chat")
        figures = httpx2.get(f"{url}/redraft/metrics", timeout=30).text
    assert server.capabilities is not None
    assert (server.capabilities.losslessness, server.capabilities.lossy_settings) == ("lossy", ("--spec-synth-len",))
    changed = [answer.prompt for answer in departing(story, asked)]
    rows = [row for row in history(story.database, "chat") if not row.lossless]
    counts = [(row.policy, row.accepted, row.proposed) for row in rows]
    sys.stdout.write(f"lossy: {len(changed)} of {len(prompts)} texts are others; {counts}; lossless {before}\n")
    assert asked.rate > story.first.rate + 0.2
    assert changed
    assert sum(row.accepted for row in rows) >= sum(answer.accepted for answer in asked.answers) * 0.9
    assert lossless(story) == before
    assert 'verification="lossy"' in figures
    assert 'verification="lossless"' not in figures


def lossless(story: Story) -> tuple[int, int]:
    """Accepted and proposed in the history, of what was verified exactly."""
    rows = [row for row in history(story.database, "chat") if row.lossless]
    return sum(row.accepted for row in rows), sum(row.proposed for row in rows)
