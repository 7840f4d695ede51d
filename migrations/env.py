"""Alembic's entry: runs migrations on the connection that `storage.database.migrate` passes.

Started by the `alembic` command it opens the database that the environment names, as every entry point does.
"""

import os
from typing import Any, Literal

from alembic import context
from sqlalchemy import Connection, text

from storage.config import StorageConfig, read
from storage.database import open_database
from storage.schema import UtcTime
from storage.tables import DrafterRow


def run(connection: Connection) -> None:
    if connection.dialect.name == "postgresql":
        # A migration that waits for a table holds up everybody behind it: give up soon, and be run again.
        connection.execute(text("SET LOCAL lock_timeout = '10s'"))
    context.configure(
        connection=connection,
        target_metadata=DrafterRow.metadata,
        transactional_ddl=True,
        render_as_batch=True,  # SQLite changes a table by copying it
        render_item=render,
    )
    with context.begin_transaction():
        context.run_migrations()


def render(kind: str, item: Any, _: Any) -> str | Literal[False]:
    """Migrations name plain types: what a revision did must not change with the code."""
    return "sa.DateTime(timezone=True)" if kind == "type" and isinstance(item, UtcTime) else False


given = context.config.attributes.get("connection")
if given is not None:
    run(given)
else:
    engine = open_database(read(StorageConfig, os.environ).sql_url)
    with engine.execution_options(writes=True).begin() as connection:
        run(connection)
