"""API keys: made once, kept private, known to the database by their hash only."""

import stat
import threading
from pathlib import Path

import pytest
from sqlalchemy import Engine, select, update

from storage.access import PREFIX, ensure_operator_key, verify
from storage.database import now, reading, transaction
from storage.tables import ApiKeyRow


def test_the_first_start_makes_a_key_that_opens_the_operator_routes(engine: Engine, tmp_path: Path) -> None:
    path = ensure_operator_key(engine, tmp_path / "home")
    assert path == tmp_path / "home" / "operator.key"
    key = path.read_text().strip()
    assert key.startswith(PREFIX)
    assert verify(engine, key) == "operator"


def test_the_key_file_is_readable_by_its_owner_only(engine: Engine, tmp_path: Path) -> None:
    path = ensure_operator_key(engine, tmp_path)
    assert path is not None
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_later_starts_leave_the_key_as_it_is(engine: Engine, tmp_path: Path) -> None:
    path = ensure_operator_key(engine, tmp_path)
    assert path is not None
    key = path.read_text()
    assert ensure_operator_key(engine, tmp_path) is None
    assert path.read_text() == key


def test_servers_that_start_at_once_make_one_key(engine: Engine, tmp_path: Path) -> None:
    made: list[Path | None] = []

    def start(number: int) -> None:
        made.append(ensure_operator_key(engine, tmp_path / str(number)))

    threads = [threading.Thread(target=start, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 3
    assert sum(path is not None for path in made) == 1


def test_a_key_that_cannot_be_written_is_not_made(engine: Engine, tmp_path: Path) -> None:
    (tmp_path / "home").write_text("a file where the folder should be")
    with pytest.raises(FileExistsError):
        ensure_operator_key(engine, tmp_path / "home")
    assert _keys(engine) == []
    assert ensure_operator_key(engine, tmp_path / "other") is not None


def test_another_key_is_refused(engine: Engine, tmp_path: Path) -> None:
    ensure_operator_key(engine, tmp_path)
    assert verify(engine, PREFIX + "guess") is None
    assert verify(engine, "") is None


def test_a_revoked_key_is_refused(engine: Engine, tmp_path: Path) -> None:
    path = ensure_operator_key(engine, tmp_path)
    assert path is not None
    with transaction(engine) as session:
        session.execute(update(ApiKeyRow).values(revoked_at=now(session)))
    assert verify(engine, path.read_text().strip()) is None


def test_the_key_itself_is_not_in_the_database(engine: Engine, tmp_path: Path) -> None:
    path = ensure_operator_key(engine, tmp_path)
    assert path is not None
    key = path.read_text().strip()
    assert all(key not in str(vars(row)) for row in _keys(engine))


def test_use_of_a_key_is_noted(engine: Engine, tmp_path: Path) -> None:
    path = ensure_operator_key(engine, tmp_path)
    assert path is not None
    assert _keys(engine)[0].last_used_at is None
    verify(engine, path.read_text().strip())
    assert _keys(engine)[0].last_used_at is not None


def _keys(engine: Engine) -> list[ApiKeyRow]:
    with reading(engine) as session:
        return list(session.scalars(select(ApiKeyRow)))
