"""`redraft bench`: what decoding, feedback, serving and learning come to on this machine, measured and written down."""

import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from cli.bench_adapt import adapt, grid
from cli.bench_drafters import drafters
from cli.bench_input import FileOption, TokensOption, numbers, prepare, texts_of
from cli.bench_sidecar import sidecar
from cli.bench_tables import show_decode, show_feedback, show_soak
from cli.init import SAMPLE_PROMPTS, read_prompts
from cli.opened import DrafterOption
from cli.output import CommandError, as_json, fail, say, write
from cli.settings import settings
from cli.subject import load_subject

app = typer.Typer(
    name="bench", help="Measure decoding, feedback, serving and learning on this machine.", no_args_is_help=True
)

BatchOption = Annotated[str, typer.Option("--batch", help="requests in flight, separated by commas")]
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
    texts = texts_of([*workload, *(more or [])])
    prepare()
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
    write(json, as_json(report.as_json()))
    if html is not None:
        write(html, page(report))


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
    prepare()
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
    write(json, as_json(report.as_json()))


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
    prepare()
    from benchmarks.soak import SoakSettings
    from benchmarks.soak import soak as run
    from cli.own_server import own_server

    with ExitStack() as stack:
        own = None if url else stack.enter_context(own_server())
        asked = SoakSettings(own.url if own else url.rstrip("/"), clients, seconds, max_tokens)
        report = run(asked, texts, own.resident_mb if own else None, say)
    show_soak(report)
    write(json, as_json(report.as_json()))
    for shortfall in report.shortfalls:
        fail(shortfall)
    if report.shortfalls:
        raise typer.Exit(1)


def _check_filled(requests: int, batches: tuple[int, ...]) -> None:
    if requests < max(batches):
        raise CommandError(f"--requests {requests} does not fill a batch of {max(batches)}: ask for as many or more")


app.command()(adapt)
app.command()(grid)
app.command()(drafters)
app.command()(sidecar)
