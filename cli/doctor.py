"""`redraft doctor`: looks at each part in turn, and says of what is wrong how to mend it."""

from collections.abc import Callable
from dataclasses import dataclass

import typer

from cli.opened import JsonOption
from cli.output import console, explain, known, show_json


@dataclass(frozen=True)
class Look:
    """One check: `look` returns what it saw, or raises; it is left out where a check that it `needs` failed."""

    name: str
    look: Callable[[], str]
    mend: str
    needs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Finding:
    name: str
    state: str  # ok, failed, skipped
    detail: str
    mend: str = ""


def doctor(json: JsonOption = False) -> None:
    """Check each part, and say how to mend what is wrong. Exit code 1 where a check failed."""
    from cli.checks import Checks

    findings = examine(Checks().looks())
    if json:
        show_json(findings)
    else:
        for finding in findings:
            _print(finding)
    if any(finding.state == "failed" for finding in findings):
        raise typer.Exit(1)


def examine(looks: tuple[Look, ...]) -> list[Finding]:
    """All checks in order."""
    findings: dict[str, Finding] = {}
    for look in looks:
        missing = [name for name in look.needs if findings[name].state != "ok"]
        findings[look.name] = (
            Finding(look.name, "skipped", f"not looked at: it needs the {missing[0]}") if missing else _try(look)
        )
    return list(findings.values())


def _try(look: Look) -> Finding:
    try:
        return Finding(look.name, "ok", look.look())
    except Exception as error:  # a check must not end the others
        what = explain(error) if known(error) else f"{type(error).__name__}: {error}"
        return Finding(look.name, "failed", what, look.mend)


COLOURS = {"ok": "green", "failed": "red", "skipped": "yellow"}


def _print(finding: Finding) -> None:
    out = console()
    out.print(f"{finding.state:<8}", style=COLOURS[finding.state], end="")
    out.print(f"{finding.name}: {finding.detail}", markup=False, soft_wrap=True)
    if finding.mend:
        out.print(f"{'':<8}mend: {finding.mend}", markup=False, soft_wrap=True)
