"""`redraft governor`: where a running server speculates, where it does not, and what the other choice would give."""

import json as jsonlib
from collections.abc import Mapping
from http import HTTPStatus
from typing import Annotated, Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import typer

from cli.opened import JsonOption
from cli.output import CommandError, figure, say, show_json, table
from cli.settings import settings
from storage.access import KEY_FILE
from storage.config import StorageConfig

OFF = "the governor is off (REDRAFT_GOVERNOR, REDRAFT_DRAFT_LENGTH): the server speculates wherever it has a drafter"
NOTHING_YET = "no round was played yet: send the server a request"
TITLE = (
    "k: the draft length chosen, 0 for plain decoding; best k: the best one above 0, and how many tokens its tree has; "
    "all figures are predictions"
)
COLUMNS = (
    "workload", "policy", "batch", "k", "why", "best k", "speed-up", "ms", "plain ms", "tokens/s", "plain tokens/s",
    "survival", "rounds",
)  # fmt: skip


def governor(
    url: Annotated[str, typer.Option("--url", help="the server's address [default: REDRAFT_HOST, REDRAFT_PORT]")] = "",
    json: JsonOption = False,
) -> None:
    """Show a server's draft lengths by workload, policy and batch size, and why it chose them."""
    answer = ask(url or _configured(), "/redraft/governor")
    if json:
        show_json(answer)
    elif not answer["on"]:
        say(OFF)
    else:
        rows = [_cells(decision) for decision in answer["decisions"]]
        table(TITLE, COLUMNS, rows, right=COLUMNS[5:11], empty=NOTHING_YET)


def ask(url: str, path: str) -> dict[str, Any]:
    """What a server answers an operator; raises `CommandError`."""
    if not url.startswith(("http://", "https://")):
        raise CommandError(f"--url {url}: an address such as http://127.0.0.1:8765")
    request = Request(url.rstrip("/") + path, headers={"Authorization": f"Bearer {_key()}"})
    try:
        with urlopen(request, timeout=10) as reply:
            answer: dict[str, Any] = jsonlib.load(reply)
    except HTTPError as error:
        hint = " (the key in the home folder is another server's)" if error.code == HTTPStatus.UNAUTHORIZED else ""
        raise CommandError(f"{url} refused: HTTP {error.code}{hint}") from error
    except (OSError, ValueError) as error:
        raise CommandError(f"no server answers at {url} ({error}): start one, or name it with --url") from error
    return answer


def _configured() -> str:
    from service.app import ServeConfig

    config = settings(ServeConfig)
    host = "127.0.0.1" if config.host in ("0.0.0.0", "") else config.host
    return f"http://[{host}]:{config.port}" if ":" in host else f"http://{host}:{config.port}"


def _key() -> str:
    path = settings(StorageConfig).home / KEY_FILE
    try:
        return path.read_text().strip()
    except OSError as error:
        raise CommandError(
            f"the operator key cannot be read from {path} ({error.strerror}): set REDRAFT_HOME"
        ) from error


def _cells(decision: Mapping[str, Any]) -> tuple[str, ...]:
    """A decision under `COLUMNS`: the best speculation beside plain decoding, whichever of them is chosen."""
    return (
        _rows(decision),
        decision["policy"],
        str(decision["batch"]),
        str(decision["draft_length"]),
        decision["why"],
        _shape(decision),
        f"{decision['speed_up']:.2f}x",
        f"{decision['speculative_ms']:.1f}",
        f"{decision['plain_ms']:.1f}",
        f"{decision['speculative_progress'] * 1e3:.1f}",
        f"{decision['plain_progress'] * 1e3:.1f}",
        " ".join(figure(share, 2) for share in decision["survival"]),
        str(decision["rounds"]),
    )


def _shape(decision: Mapping[str, Any]) -> str:
    """A chain's length, or a tree's depth and size; `n-grams` where it holds what followed a match."""
    depth, nodes = decision["speculative"], decision["nodes"]
    said = str(depth) if nodes <= depth else f"{depth}, {'fixed' if decision['fixed'] else 'grown'} tree of {nodes}"
    matches = "n-grams and drafter" if decision["joined"] else "n-grams"
    return f"{said}, {matches}" if decision["lookup"] else said


def _rows(decision: Mapping[str, Any]) -> str:
    """The workload; of rows with n-gram matches, apart from the others of it, how long those are."""
    workload, match = decision["workload"], decision["match"]
    return workload if match == "none" else f"{workload}, {match} match"
