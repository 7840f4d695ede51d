"""`redraft watch`: a version after its promotion beside its predecessor, and what the sequential test says of them."""

import time
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.opened import DrafterOption, JsonOption, Opened, open_drafter
from cli.output import age, figure, say, show_json, table
from cli.settings import settings

if TYPE_CHECKING:
    from storage.watches import Watch

COLUMNS = ("workload", "policy", "figure", "before", "new", "predecessor", "version", "fall", "says")
NONE = "no promotion was watched yet: after `redraft promote`, or an update, a share of the requests stays behind"


@dataclass(frozen=True)
class View:
    """A watch as it stands now; findings are by workload, policy and figure."""

    drafter: str
    version: int
    predecessor: int
    generation: int
    canary: bool  # the version is tried out before its promotion, and the predecessor is live
    share: float  # of the requests, that the predecessor serves while the watch is open
    state: str  # open, safe, worse, ended, overtaken
    verdict: str  # watching, worse, safe, ended: what the test says now; empty once the watch is closed
    reason: str
    requests: int
    strayed: int  # requests whose rounds were mostly another version's than meant
    findings: list[dict[str, Any]]
    opened_at: datetime
    closed_at: datetime | None


def watch(
    drafter: DrafterOption = "",
    once: Annotated[bool, typer.Option("--once", help="print once, and do not wait for more")] = False,
    seconds: Annotated[float, typer.Option(help="between two looks", min=0.1)] = 2.0,
    json: JsonOption = False,
) -> None:
    """Watch the version that was promoted last, or the canary, against its predecessor, until the watch ends."""
    opened = open_drafter(drafter)
    while True:
        found = view(opened)
        if json:
            show_json(found)
        elif found is None:
            say(NONE)
        else:
            _print(found)
        if once or json or found is None or found.state != "open":
            return
        time.sleep(seconds)


def view(opened: Opened) -> View | None:
    """The newest watch; None where there was none. Nothing is decided here: the worker does that."""
    from storage.watches import Watches

    watches = Watches(opened.database)
    recent = watches.recent(opened.drafter.name, 1)
    if not recent:
        return None
    return _open(watches, recent[0]) if recent[0].state == "open" else _view(recent[0], "", 0)


def _open(watches: Any, found: "Watch") -> View:
    """An open watch with the test done anew, as feedback may have come in since the worker's last look."""
    from dataclasses import replace

    from adapter.watch import WatchConfig, judge

    seen = watches.observations(found)
    verdict = judge(seen, found.share, settings(WatchConfig), watches.hours(found), found.canary)
    fresh = replace(
        found, reason=verdict.reason, requests=len(seen), findings=[asdict(one) for one in verdict.findings]
    )
    return _view(fresh, verdict.state, sum(one.strayed for one in seen))


def _view(found: "Watch", verdict: str, strayed: int) -> View:
    return View(
        drafter=found.drafter,
        version=found.version,
        predecessor=found.predecessor,
        generation=found.generation,
        canary=found.canary,
        share=found.share,
        state=found.state,
        verdict=verdict,
        reason=found.reason,
        requests=found.requests,
        strayed=strayed,
        findings=found.findings,
        opened_at=found.opened_at,
        closed_at=found.closed_at,
    )


def _print(found: View) -> None:
    began = f"{age(found.opened_at)} ago"
    how = (
        f"a canary with {1 - found.share:.0%} of the requests since {began}"
        if found.canary
        else f"promoted {began}, {found.share:.0%} held back"
    )
    title = (
        f"version {found.version} of {found.drafter} against version {found.predecessor}, {how}: "
        f"{found.verdict or found.state}"
    )
    rows = [_cells(finding) for finding in found.findings]
    table(title, COLUMNS, rows, right=COLUMNS[3:8], empty=f"{title}; no request has finished yet")
    say(found.reason)


def _cells(finding: dict[str, Any]) -> tuple[str, ...]:
    digits = 3 if finding["figure"] == "acceptance rate" else 4
    says = "worse" if finding["worse"] else "safe" if finding["safe"] else "watching"
    return (
        finding["workload"],
        finding["policy"],
        finding["figure"],
        str(finding["held"]),
        str(finding["others"]),
        figure(finding["predecessor"], digits),
        figure(finding["live"], digits),
        f"[{finding['low']:+.3f}, {finding['high']:+.3f}]",
        says,
    )
