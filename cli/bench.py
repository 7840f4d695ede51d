"""`redraft bench`: what decoding, feedback and serving cost on this machine, measured and written down."""

import json as json_module
import os
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from cli import logs
from cli.bench_tables import show_decode, show_feedback, show_soak
from cli.init import SAMPLE_PROMPTS, read_prompts
from cli.opened import DrafterOption
from cli.output import CommandError, fail, plain, say
from cli.settings import settings, warn_unknown
from cli.subject import load_subject
from service.engine.heap import settle

T = TypeVar("T", int, float)

app = typer.Typer(name="bench", help="Measure decoding, feedback and serving on this machine.", no_args_is_help=True)

BatchOption = Annotated[str, typer.Option("--batch", help="requests in flight, separated by commas")]
FileOption = Annotated[Path | None, typer.Option("--json", help="file to write all figures to")]
TokensOption = Annotated[int, typer.Option(help="output tokens of a request at most", min=2)]
RepeatsOption = Annotated[int, typer.Option(help="runs of each arm, in turn; figures are medians", min=1)]
RequestsOption = Annotated[int, typer.Option(help="prompts of a workload, evenly spread over its file", min=1)]
VersionOption = Annotated[int | None, typer.Option("--version", help="version of the drafter; default: the live one")]


@app.command()
def decode(
    workload: Annotated[
        list[Path], typer.Option(help='JSON lines, each {"prompt": "..."}; the file gives its name; repeatable')
    ],
    more: Annotated[list[Path] | None, typer.Argument(metavar="[FILE]...", help="further workloads")] = None,
    k: Annotated[str, typer.Option("--k", help="draft lengths, separated by commas")] = "1,2,4,6",
    temperature: Annotated[str, typer.Option(help="temperatures, separated by commas")] = "0,0.8",
    batch: BatchOption = "1,8",
    requests: RequestsOption = 16,
    json: FileOption = None,
    html: Annotated[Path | None, typer.Option(help="file to write a page with plots to")] = None,
    max_tokens: TokensOption = 96,
    repeats: RepeatsOption = 3,
    drafter: DrafterOption = "",
    version: VersionOption = None,
    random_weights: Annotated[bool, typer.Option("--random-weights", help="a drafter that knows nothing")] = False,
) -> None:
    """Hold speculation, fixed and governed, against plain decoding and against transformers' own generate."""
    ks, batches = numbers("--k", k, int, 1), numbers("--batch", batch, int, 1)
    temperatures = numbers("--temperature", temperature, float, 0.0)
    _check_filled(requests, batches)
    texts = _texts([*workload, *(more or [])])
    _prepare()
    subject = load_subject(drafter, version, random_weights)
    from benchmarks.decode import DecodeSettings, measure
    from benchmarks.page import page
    from benchmarks.workload import workload as prepared
    from service.engine.engine import EngineConfig
    from service.engine.governor import GovernorConfig

    target, asked = subject.target, (ks, temperatures, batches, requests, max_tokens, repeats)
    measured = DecodeSettings(*asked, subject.name, subject.version, random_weights)
    workloads = [prepared(name, found, target, requests, target.context - max_tokens) for name, found in texts.items()]
    report = measure(
        target, subject.drafter, settings(EngineConfig), settings(GovernorConfig), workloads, measured, say
    )
    show_decode(report.rows)
    _write(json, as_json(report.as_json()))
    if html is not None:
        _write(html, page(report))


@app.command()
def feedback(
    workload: Annotated[Path, typer.Option(help='JSON lines, each {"prompt": "..."}')] = SAMPLE_PROMPTS,
    k: Annotated[int, typer.Option("--k", help="draft length", min=1)] = 4,
    batch: BatchOption = "1,8",
    requests: RequestsOption = 8,
    json: FileOption = None,
    max_tokens: TokensOption = 96,
    repeats: RepeatsOption = 7,
    drafter: DrafterOption = "",
    version: VersionOption = None,
) -> None:
    """Hold the speed with feedback written to Redis against the speed without any."""
    batches = numbers("--batch", batch, int, 1)
    _check_filled(requests, batches)
    texts = read_prompts(workload)
    _prepare()
    subject = load_subject(drafter, version)
    from benchmarks.feedback import FeedbackSettings, measure
    from benchmarks.workload import workload as prepared
    from service.engine.engine import EngineConfig
    from storage.valkey import start_valkey

    target, asked = subject.target, FeedbackSettings(batches, requests, max_tokens, repeats, k)
    prompts = prepared(workload.stem, texts, target, requests, target.context - max_tokens)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="redraft-")))
        redis = stack.enter_context(start_valkey(folder / "v.sock", folder / "valkey"))
        report = measure(target, subject.drafter, settings(EngineConfig), prompts, asked, redis.url, say)
    show_feedback(report.rows)
    _write(json, as_json(report.as_json()))


@app.command()
def soak(
    clients: Annotated[int, typer.Option(help="streaming clients; one of them reads slowly", min=2)] = 64,
    seconds: Annotated[float, typer.Option(help="how long, a third of it warm-up", min=1)] = 120.0,
    url: Annotated[str, typer.Option(help="a running server; default: one is started here")] = "",
    max_tokens: TokensOption = 64,
    prompts: Annotated[Path, typer.Option(help='JSON lines, each {"prompt": "..."}')] = SAMPLE_PROMPTS,
    json: FileOption = None,
) -> None:
    """Stream to many clients for a while; exit 1 if a request fails, a slot stays taken or memory grows."""
    texts = read_prompts(prompts)
    if url and not url.startswith("http://"):
        raise CommandError(f"--url {url}: only http:// addresses, such as http://127.0.0.1:8765")
    _prepare()
    from benchmarks.soak import SoakSettings
    from benchmarks.soak import soak as run
    from cli.own_server import own_server

    with ExitStack() as stack:
        own = None if url else stack.enter_context(own_server())
        asked = SoakSettings(own.url if own else url.rstrip("/"), clients, seconds, max_tokens)
        report = run(asked, texts, own.resident_mb if own else None, say)
    show_soak(report)
    _write(json, as_json(report.as_json()))
    for shortfall in report.shortfalls:
        fail(shortfall)
    if report.shortfalls:
        raise typer.Exit(1)


def numbers(option: str, text: str, kind: type[T], least: T) -> tuple[T, ...]:
    """The numbers of a comma-separated option, each once; raises `CommandError` naming what is no such number."""
    found = []
    for part in text.split(","):
        try:
            found.append(kind(part))
        except ValueError as error:
            raise CommandError(f"{option} {text!r}: {part.strip()!r} is no number; write for example 1,2,4") from error
        if not found[-1] >= least:
            raise CommandError(f"{option} {text!r}: {part.strip()} is below {least}")
    return tuple(dict.fromkeys(found))


def as_json(value: Any) -> str:
    return json_module.dumps(plain(value), indent=2, ensure_ascii=False) + "\n"


def _texts(files: list[Path]) -> dict[str, list[str]]:
    """The prompts of each workload, by the name of its file."""
    texts = {path.stem: read_prompts(path) for path in files}
    if len(texts) < len(files):
        raise CommandError("two --workload files have one name: rename one, as rows are told apart by it")
    return texts


def _check_filled(requests: int, batches: tuple[int, ...]) -> None:
    if requests < max(batches):
        raise CommandError(f"--requests {requests} does not fill a batch of {max(batches)}: ask for as many or more")


def _prepare() -> None:
    """A process that decodes as a server's does. Only what goes wrong is logged: the output is the table."""
    settle(os.environ)
    logs.configure(logs.LogConfig(log_level="WARNING"))
    warn_unknown()


def _write(path: Path | None, text: str) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        say(f"wrote {path}")
