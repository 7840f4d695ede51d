"""Settings: frozen dataclasses filled from `REDRAFT_*` environment variables.

Each part keeps its own small settings class beside its code; `read` fills one from an environment. Only
entry points (cli, worker.app) call `read`, so nothing else depends on the process environment.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

PREFIX = "REDRAFT_"
T = TypeVar("T")


class SettingError(ValueError):
    """A setting has a value that cannot be used; the message names the variable and the value."""


def setting(default: Any, help: str) -> Any:
    """A dataclass field with a default and the line that documents it in the settings table."""
    return field(default=default, metadata={"help": help})


def variable(name: str) -> str:
    """The environment variable that fills the field `name`."""
    return PREFIX + name.upper()


def read(cls: type[T], environ: Mapping[str, str]) -> T:
    """Fill the settings class `cls` from `environ`; fields without a variable keep their defaults."""
    names = [f.name for f in fields(cls)]  # type: ignore[arg-type]
    given = {name: environ[variable(name)] for name in names if environ.get(variable(name), "") != ""}
    try:
        return TypeAdapter(cls).validate_python(given)
    except ValidationError as error:
        problems = [f"{variable(str(e['loc'][0]))}={e['input']!r}: {e['msg']}" for e in error.errors() if e["loc"]]
        raise SettingError("; ".join(problems) or str(error)) from error


@dataclass(frozen=True)
class StorageConfig:
    """Where state is kept. The defaults are the embedded ones: SQLite and a Valkey socket under `home`."""

    home: Path = setting(Path(".redraft"), "folder of the embedded database, sockets, weights and keys")
    database_url: str = setting("", "SQLAlchemy URL; empty: SQLite in the home folder")
    redis_url: str = setting("", "Redis or Valkey URL; empty: the embedded Valkey's socket in the home folder")
    weights: str = setting("", "folder of the weights store; empty: `weights` in the home folder")
    stream_length: int = setting(20_000, "feedback records kept on the stream at most")
    retention_hours: float = setting(24.0, "age at which a feedback record is trimmed, trained on or not")

    @property
    def sql_url(self) -> str:
        return self.database_url or f"sqlite:///{(self.home / 'redraft.db').absolute()}"

    @property
    def socket(self) -> Path:
        """The embedded Valkey's socket. Unix sockets have short names: a deep home gets one in /tmp."""
        path = (self.home / "valkey.sock").absolute()
        if len(str(path)) < 100:
            return path
        from hashlib import sha256

        return Path("/tmp") / f"redraft-{sha256(str(path).encode()).hexdigest()[:16]}.sock"

    @property
    def stream_url(self) -> str:
        return self.redis_url or f"unix://{self.socket}?db=0"

    @property
    def weights_folder(self) -> Path:
        return Path(self.weights) if self.weights else self.home / "weights"
