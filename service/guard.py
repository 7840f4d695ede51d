"""Who may use the operator routes: a holder of the operator key, from an address that is ours.

The key is what counts. The checks of Host and Origin keep a page in the operator's browser from reaching a
server on loopback under a name of its own (DNS rebinding) or across sites.
"""

from typing import Annotated
from urllib.parse import urlsplit

from fastapi import Header
from sqlalchemy import Engine

from service.openai_errors import ApiError
from storage.access import OPERATOR, verify

LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
CHALLENGE = "Bearer"


class Guard:
    """A dependency of every operator route; raises `ApiError` 401 or 403 where the request may not pass."""

    def __init__(self, database: Engine, hosts: frozenset[str]) -> None:
        self._database, self._hosts = database, LOOPBACK | hosts

    def __call__(
        self,
        authorization: Annotated[str, Header()] = "",
        host: Annotated[str, Header()] = "",
        origin: Annotated[str | None, Header()] = None,
        sec_fetch_site: Annotated[str, Header()] = "none",
    ) -> None:
        self._check_address(host, origin, sec_fetch_site)
        scheme, _, key = authorization.partition(" ")
        if scheme.lower() != "bearer" or verify(self._database, key.strip()) != OPERATOR:
            raise ApiError(
                401,
                "this needs the operator key: send `Authorization: Bearer KEY`, "
                "with the key from operator.key in the server's home folder",
                code="invalid_api_key",
                headers={"WWW-Authenticate": CHALLENGE},
            )

    def _check_address(self, host: str, origin: str | None, sec_fetch_site: str) -> None:
        if _name(host) not in self._hosts:
            raise ApiError(403, f"not reached by a name of this server ({host}): add it to REDRAFT_HOSTS")
        if sec_fetch_site not in {"none", "same-origin"} or (origin and urlsplit(origin).netloc != host):
            raise ApiError(403, "requests from other sites' pages are refused")


def _name(host: str) -> str:
    """A Host header without its port."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""
