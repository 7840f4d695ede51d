"""`redraft demo`: the command."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from cli import logs
from cli.output import console, fail, say
from cli.settings import settings

REPORT_FOLDER = Path("build/demo")


def demo(
    requests: Annotated[int, typer.Option(help="requests to send, half of each workload", min=16)] = 120,
    kind: Annotated[str, typer.Option(help="of drafter: causal_lm, medusa, mtp, eagle or streaming")] = "causal_lm",
    out: Annotated[Path, typer.Option(help="folder of report.json and acceptance.png")] = REPORT_FOLDER,
) -> None:
    """Send real prompts to a whole stack, watch the drafter learn, roll it back, and measure."""
    logs.configure(replace(settings(logs.LogConfig), log_level="WARNING"))
    from adapter.drafters.kinds import kind_of
    from cli.demo.story import tell

    kind_of(kind)
    report = tell(console(), requests, kind, os.environ, out)
    say(
        f"{report.kind}: {report.requests} requests, {report.failed_requests} failed; {len(report.versions)} versions, "
        f"{report.promoted} promoted, {report.refused} refused; rolled back in {report.rollback_ms:.0f} ms; "
        f"{report.seconds:.0f} s in all. See {out / 'report.json'} and {out / 'acceptance.png'}"
    )
    for shortfall in report.shortfalls:
        fail(shortfall)
    if report.shortfalls:
        raise typer.Exit(1)
