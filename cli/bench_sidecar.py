"""`redraft bench sidecar`: what a sidecar costs the engine behind it."""

import json as jsonlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated
from urllib.request import urlopen

import typer
from rich.table import Table

from cli.bench_input import FileOption, numbers
from cli.children import Child, redraft
from cli.init import SAMPLE_PROMPTS, read_prompts
from cli.output import CommandError, as_json, console, fail, say, write

READY_SECONDS = 120.0
DRAFTER = "bench"


def sidecar(
    url: Annotated[str, typer.Argument(help="address of a running engine, such as http://127.0.0.1:8000")],
    share: Annotated[str, typer.Option(help="shares of the requests that are observed, separated by commas")] = "0.1",
    batch: Annotated[str, typer.Option("--batch", help="requests in flight, separated by commas")] = "1,4",
    requests: Annotated[int, typer.Option(help="prompts of a pass", min=1)] = 20,
    max_tokens: Annotated[int, typer.Option(help="tokens of each answer", min=1)] = 64,
    repeats: Annotated[int, typer.Option(help="passes of each arm, in turn; figures are medians", min=1)] = 7,
    prompts: Annotated[Path, typer.Option(help='JSON lines, each {"prompt": "..."}')] = SAMPLE_PROMPTS,
    limit: Annotated[float, typer.Option(help="overhead in percent above which the command fails")] = 3.0,
    json: FileOption = None,
) -> None:
    """Hold an engine's throughput through a sidecar against its throughput without one, in turn."""
    from benchmarks.sidecar import DIRECT, SidecarSettings, measure

    shares = numbers("--share", share, float, 0.0)
    batches = numbers("--batch", batch, int, 1)
    texts = read_prompts(prompts)
    wanted = tuple((texts * (requests // len(texts) + 1))[:requests])
    reports = []
    with ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        arms = {DIRECT: url}
        model, root = _model(url)
        redis_url = _storage(stack, home, root)
        for each in shares:
            arms[f"{each:.0%} observed"] = stack.enter_context(_own_sidecar(url, each, home, redis_url))
        for size in batches:
            report = measure(SidecarSettings(model, wanted, max_tokens, size, repeats), arms, say)
            reports.append(report)
    table = Table("batch", "arm", "tokens/s", "overhead", "first token, ms")
    for report in reports:
        for arm in report.arms:
            lost = "" if arm.arm == DIRECT else f"{report.overhead(arm.arm):+.1%}"
            table.add_row(str(report.batch), arm.arm, f"{arm.median:.1f}", lost, f"{arm.first_token_ms:.0f}")
    console().print(table)
    write(json, as_json([asdict(report) for report in reports]))
    worst = max(report.overhead(arm.arm) for report in reports for arm in report.arms if arm.arm != DIRECT)
    if worst * 100 > limit:
        fail(f"a sidecar costs {worst:.1%}, more than {limit:g} %")
        raise typer.Exit(1)


def _model(url: str) -> tuple[str, str]:
    """Its name, and the folder that it is from."""
    try:
        with urlopen(f"{url.rstrip('/')}/v1/models", timeout=10) as answer:
            told = jsonlib.load(answer)["data"][0]
    except (OSError, ValueError, LookupError) as error:
        raise CommandError(f"no OpenAI-compatible engine answers at {url}: start one first ({error})") from error
    return str(told["id"]), str(told.get("root") or "")


def _storage(stack: ExitStack, home: Path, root: str) -> str:
    """A database with a drafter and a Valkey of its own, so that records go where they always do; Valkey's URL."""
    from adapter.fingerprints import identify
    from storage.config import StorageConfig
    from storage.database import migrate, open_database
    from storage.registry import Registry
    from storage.valkey import start_valkey

    storage = StorageConfig(home=home)
    database = open_database(storage.sql_url)
    stack.callback(database.dispose)
    migrate(database)
    target = identify(DRAFTER, Path(root), home).fingerprint if root and Path(root).is_dir() else "unknown"
    Registry(database).create_drafter(DRAFTER, "causal_lm", target, "unknown", {}, "0" * 64, 1, "bench")
    return stack.enter_context(start_valkey(storage.socket, home / "valkey")).url


@contextmanager
def _own_sidecar(url: str, share: float, home: Path, redis_url: str) -> Iterator[str]:
    """Its address, when it knows its engine."""
    from cli.own_server import HOST, await_answer, end, free_port

    port = free_port()
    environ = {
        **os.environ, "REDRAFT_HOME": str(home), "REDRAFT_REDIS_URL": redis_url, "REDRAFT_DATABASE_URL": "",
        "REDRAFT_DRAFTER": DRAFTER, "REDRAFT_SIDECAR_SHARE": str(share), "REDRAFT_SIDECAR_PORT": str(port),
        "REDRAFT_SIDECAR_HOST": HOST,
    }  # fmt: skip
    child = Child(f"sidecar-{share:g}", redraft("sidecar", url, "--drain", "3"), environ, home)
    child.start()
    try:
        address = f"http://{HOST}:{port}"
        page = "capabilities" if share else "health"  # the first when the engine was found, the second at once
        await_answer(child, f"{address}/redraft/{page}", "the sidecar", READY_SECONDS)
        yield address
    finally:
        end(child)
