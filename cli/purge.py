"""`redraft purge`: deletes a tenant's records wherever they are, and names the versions that learnt from them."""

import sys
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from cli import logs
from cli.opened import JsonOption, database
from cli.operate import announce
from cli.output import CommandError, say, show_json, table
from cli.settings import actor, settings
from storage.config import StorageConfig

if TYPE_CHECKING:
    from sqlalchemy import Engine

    from storage.purge import Found, Purge


def purge(
    tenant: Annotated[str, typer.Option("--tenant", help="whose records to delete, exactly as requests name it")],
    retire: Annotated[
        bool,
        typer.Option("--retire", help="withdraw the versions that learnt from them, and roll back those that are live"),
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="do not ask")] = False,
    json: JsonOption = False,
) -> None:
    """Delete a tenant's records from stream, quarantine and windows, and name the versions that learnt from them."""
    from storage import purge as purging

    logs.configure(replace(settings(logs.LogConfig), log_level="WARNING"))
    engine = database()
    found = purging.found(engine, tenant)
    if not yes:
        _ask(tenant, found, retire)
    done = _finish(engine, purging.begin(engine, tenant, retire, actor()))
    if json:
        show_json({"purge": done, "versions": purging.found(engine, tenant).versions})
    else:
        _say(engine, done)


def _ask(tenant: str, found: "Found", retire: bool) -> None:
    if not sys.stdin.isatty():
        raise CommandError("nobody can be asked here: add --yes")
    say(
        f"{found.training} training and {found.holdout} holdout records of tenant {tenant} in {found.windows} windows, "
        "and what waits on the streams, will be deleted for good"
    )
    _say_versions(found)
    if retire and found.versions:
        say("these versions will be withdrawn: none of them can be made live again")
    typer.confirm("go on?", abort=True)


def _finish(engine: "Engine", begun: "Purge") -> "Purge":
    """All steps; where Redis is away, the purge stays begun, and that is said."""
    from redis import RedisError

    from storage.purge import finish
    from storage.redis_clients import admin
    from storage.registry import Registry
    from storage.stream import FeedbackStream
    from storage.weights import WeightsStore

    config = settings(StorageConfig)
    drafters = Registry(engine).drafters(include_retired=True)
    try:
        with admin(config.stream_url) as client:
            streams = [FeedbackStream(client, d.name, config.stream_length, config.retention_hours) for d in drafters]
            done = finish(engine, WeightsStore(config.weights_folder), streams, begun)
            if not config.redis_url:  # ours alone: what was deleted leaves its log on disk as well
                with suppress(RedisError):
                    client.bgrewriteaof()
    except RedisError as error:
        raise CommandError(
            f"Redis cannot be reached ({error}): the windows are clean, the stream is not, and no version was "
            "withdrawn. Run this again when it is back, or let the housekeeper finish it"
        ) from error
    announce(engine, config.stream_url)
    return done


def _say(engine: "Engine", done: "Purge") -> None:
    from storage.purge import found

    counts = done.counts
    say(
        f"tenant {done.tenant}: {counts['training']} training and {counts['holdout']} holdout records deleted from "
        f"{counts['windows']} windows, {counts['stream']} from the streams and the quarantine"
        + (f", and {counts['unreadable']} that nobody can read" if counts["unreadable"] else "")
    )
    say("the acceptance history counts requests by version and minute and names no tenant: it stays")
    after = found(engine, done.tenant)
    _say_versions(after)
    for move in counts["rolled_back"]:
        say(f"rolled back: {move}")
    if after.versions and done.withdraw:
        say("they are withdrawn: none of them can be made live again, and their weights go with the next garbage")
    _say_live(engine, after)


def _say_versions(found: "Found") -> None:
    columns = ("drafter", "version", "how", "live")
    rows = [(v.drafter, str(v.number), v.how, "live" if v.live else "") for v in found.versions]
    table("versions that learnt from them", columns, rows, empty="no version learnt from them")


def _say_live(engine: "Engine", found: "Found") -> None:
    """Where a version that learnt from the records is still live, say what to go back to."""
    from storage.purge import untouched

    for version in found.versions:
        if not version.live:
            continue
        number = untouched(engine, version.drafter, found.versions)
        way = f"`redraft rollback --to {number} --drafter {version.drafter}`, or run this again with --retire"
        say(
            f"version {version.number} of {version.drafter} is live and learnt from them: "
            + (way if number is not None else "no version is left that did not; make a new drafter with `redraft init`")
        )
