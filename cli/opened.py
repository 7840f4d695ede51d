"""What the operator's commands open: the database, and the drafter that they are about."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from cli.settings import CommandConfig, settings
from storage.config import StorageConfig

if TYPE_CHECKING:
    from sqlalchemy import Engine

    from storage.registry import Drafter, Registry

DrafterOption = Annotated[str, typer.Option("--drafter", help="name of the drafter [default: REDRAFT_DRAFTER]")]
JsonOption = Annotated[bool, typer.Option("--json", help="print JSON")]


@dataclass(frozen=True)
class Opened:
    config: StorageConfig
    database: "Engine"
    registry: "Registry"
    drafter: "Drafter"


def database() -> "Engine":
    """The database; raises `NotMigrated` where its tables are not this version's."""
    from storage.database import check_migrated, open_database

    engine = open_database(settings(StorageConfig).sql_url)
    check_migrated(engine)
    return engine


def open_drafter(name: str) -> Opened:
    """The drafter called `name`, else the one of REDRAFT_DRAFTER, else the only one."""
    from storage.registry import Registry

    engine = database()
    registry = Registry(engine)
    drafter = registry.choose(name or settings(CommandConfig).drafter, None)
    return Opened(settings(StorageConfig), engine, registry, drafter)
