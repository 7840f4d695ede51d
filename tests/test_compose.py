"""docker-compose.yml: what it promises, and that each redraft command in it starts, is healthy and stops.

No Docker is needed: the services run as processes, against Valkey started by the file's own command and an
embedded PostgreSQL.
"""

import json
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI
from redis.exceptions import AuthenticationError
from sqlalchemy import create_engine, make_url, text

from cli.settings import settings_classes, unknown
from storage.config import read
from storage.redis_clients import admin
from storage.valkey import find_binary
from tests.composition import CLEAN_EXITS, Composition, VariableNotSet, composed
from tests.test_packages import CHECKOUT
from tests.tiny import tiny_target_dir
from tests.waiting import until

SECRETS = {"POSTGRES_PASSWORD": "p" * 32, "VALKEY_PASSWORD": "v" * 32}
SERVICES: dict[str, Any] = composed(SECRETS)["services"]
OURS = [name for name, service in SERVICES.items() if service.get("command", [""])[0] == "redraft"]
LASTING = [name for name in OURS if name != "migrate"]
# What a tiny drafter needs to learn something within seconds.
LEARNING = {
    "REDRAFT_WINDOW_RECORDS": "40",
    "REDRAFT_WINDOW_COPIES": "8",  # the tests ask few prompts again and again
    "REDRAFT_HOLDOUT_SHARE": "0.3",
    "REDRAFT_MINIMUM_REQUESTS": "4",
    "REDRAFT_EPOCHS": "8",
    "REDRAFT_BATCH_TOKENS": "256",
    "REDRAFT_LEARNING_RATE": "0.003",
    "REDRAFT_LEASE_SECONDS": "10",
    "REDRAFT_SWEEP_SECONDS": "1",
}
START_SECONDS = 300.0  # two processes import torch at once, on slow cores


def test_the_parts_of_production_are_there() -> None:
    assert set(SERVICES) == {"valkey", "postgres", "migrate", "serve", "trainer", "housekeeper", "beat"}
    assert all(SERVICES[name]["command"] == ["redraft", name] for name in OURS)


def test_everything_but_the_one_shot_has_a_health_check_and_is_restarted() -> None:
    for name in set(SERVICES) - {"migrate"}:
        assert SERVICES[name]["healthcheck"]["test"], name
        assert SERVICES[name]["restart"] == "unless-stopped", name
    assert SERVICES["migrate"]["restart"] == "no"


def test_liveness_is_the_age_in_sql_and_never_a_ping_of_celery() -> None:
    for name in ("trainer", "housekeeper", "beat"):
        assert SERVICES[name]["healthcheck"]["test"] == ["CMD", "redraft", "alive", name]


@pytest.mark.parametrize("name", LASTING)
def test_a_service_starts_after_the_migration_and_the_stores(name: str) -> None:
    conditions = {other: need["condition"] for other, need in SERVICES[name]["depends_on"].items()}
    assert conditions == {
        "migrate": "service_completed_successfully",
        "postgres": "service_healthy",
        "valkey": "service_healthy",
    }


@pytest.mark.parametrize("name", SERVICES)
def test_no_service_is_root_or_can_become_root(name: str) -> None:
    assert SERVICES[name]["user"] not in {"", "root", "0"}
    assert SERVICES[name]["cap_drop"] == ["ALL"]
    assert "no-new-privileges:true" in SERVICES[name]["security_opt"]
    assert not SERVICES[name].get("privileged", False)
    assert not any("docker.sock" in volume for volume in SERVICES[name].get("volumes", []))


def test_only_serving_has_a_port_and_only_on_loopback() -> None:
    published = {name: service["ports"] for name, service in SERVICES.items() if "ports" in service}
    assert published == {"serve": ["127.0.0.1:8765:8765"]}


@pytest.mark.parametrize("name", SECRETS)
def test_a_secret_has_no_default(name: str) -> None:
    with pytest.raises(VariableNotSet, match=name):
        composed({key: value for key, value in SECRETS.items() if key != name})


@pytest.mark.parametrize("name", OURS)
def test_the_variables_are_settings_with_values_that_can_be_used(name: str) -> None:
    environ = {key: str(value) for key, value in SERVICES[name]["environment"].items()}
    assert unknown(environ) == []
    for cls in settings_classes():
        read(cls, environ)


@pytest.mark.parametrize("name", OURS)
def test_state_is_kept_on_volumes_and_nowhere_else(name: str) -> None:
    service, volumes = SERVICES[name], composed(SECRETS)["volumes"]
    mounts = dict(reversed(mount.split(":")) for mount in service["volumes"])
    assert {service["environment"]["REDRAFT_HOME"], service["environment"]["REDRAFT_CACHE"]} == set(mounts)
    assert set(mounts.values()) <= set(volumes)
    assert service["read_only"]


def test_the_image_runs_under_the_constraints_and_not_as_root() -> None:
    lines = (CHECKOUT / "Dockerfile").read_text().splitlines()
    assert "FROM python:3.11-slim" in lines
    assert [line.split()[1] for line in lines if line.startswith("USER")] == [SERVICES["serve"]["user"]]
    assert sum("-c constraints.txt" in line for line in lines) == sum("pip install" in line for line in lines)


@pytest.fixture(scope="module")
def valkey_port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """Valkey by the file's own command, on a free port of the loopback."""
    port = free_port()
    place = ["--bind", "127.0.0.1", "--port", str(port), "--dir", str(tmp_path_factory.mktemp("valkey"))]
    command = [str(find_binary()), *SERVICES["valkey"]["command"][1:], *place]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as server:
        until(lambda: listens(port), lambda: "Valkey does not take the file's command")
        yield port
        server.terminate()


@pytest.fixture(scope="module")
def postgres(postgres_url: str) -> Iterator[str]:
    """What stands for `@postgres:5432/redraft`: a database whose owner is a role without any privilege."""
    server = make_url(postgres_url)
    opened = create_engine(server.set(drivername="postgresql+psycopg"), isolation_level="AUTOCOMMIT")
    with opened.connect() as admin_session:
        admin_session.execute(text("CREATE ROLE redraft LOGIN"))
        admin_session.execute(text("CREATE DATABASE redraft OWNER redraft"))
        yield f"@/redraft?host={server.query['host']}"
        admin_session.execute(text("DROP DATABASE redraft WITH (FORCE)"))
        admin_session.execute(text("DROP ROLE redraft"))
    opened.dispose()


@pytest.fixture(scope="module")
def composition(valkey_port: int, postgres: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Composition]:
    """All services of the file, started in its order on a tiny target, with the first drafter made."""
    folder = tmp_path_factory.mktemp("compose")
    environ = {**SECRETS, "REDRAFT_TARGET": str(tiny_target_dir(folder / "target"))}
    rewrites = {
        "@valkey:6379": f"@127.0.0.1:{valkey_port}",
        "@postgres:5432/redraft": postgres,
        "/var/lib/redraft": str(folder / "home"),
        "/var/cache/redraft": str(folder / "cache"),
        "0.0.0.0": "127.0.0.1",  # tests stay on the loopback
        "8765": str(free_port()),
    }
    services = composed(environ)["services"]
    for name in OURS:
        services[name]["environment"] |= LEARNING
    composition = Composition(services, rewrites, folder)
    try:
        migrated = composition.execute("migrate", SERVICES["migrate"]["command"])
        assert migrated.returncode == 0, migrated.stderr
        assert not any(composition.healthy(name) for name in LASTING)
        for name in LASTING:
            composition.start(name)
        yield composition
    finally:
        composition.close()


def test_valkey_by_the_files_command_never_evicts_and_keeps_what_it_was_told(valkey_port: int) -> None:
    with admin(f"redis://:{SECRETS['VALKEY_PASSWORD']}@127.0.0.1:{valkey_port}/0") as client:
        settings = client.config_get("maxmemory-policy", "appendonly", "appendfsync")
        assert settings == {"maxmemory-policy": "noeviction", "appendonly": "yes", "appendfsync": "everysec"}
    with (
        admin(f"redis://127.0.0.1:{valkey_port}/0") as stranger,
        pytest.raises(AuthenticationError),
    ):
        stranger.ping()


@pytest.mark.parametrize("name", LASTING)
def test_a_service_becomes_healthy_by_its_own_check(composition: Composition, name: str) -> None:
    log = composition.log(name)
    until(lambda: composition.ended(name) or composition.healthy(name), log.read_text, START_SECONDS)
    assert not composition.ended(name), log.read_text()


def test_a_drafter_made_as_the_file_says_is_soon_served(composition: Composition) -> None:
    made = composition.execute("serve", ["redraft", "init", "first", "--layers", "1", "--draft-vocab", "64"])
    assert made.returncode == 0, made.stderr
    until(
        lambda: "first" in composition.execute("serve", ["redraft", "servers"]).stdout,
        lambda: composition.log("serve").read_text(),
        START_SECONDS,
    )


def test_the_circle_closes_on_postgresql_and_a_killed_trainer_costs_nothing(composition: Composition) -> None:
    port = composition.environ("serve")["REDRAFT_PORT"]
    openai = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
    model = openai.models.list().data[0].id
    first = [answer(openai, model, n % 6) for n in range(48)]
    until(lambda: len(versions(composition)) == 2, lambda: "no version 2 was made", START_SECONDS)
    composition.kill("trainer")
    composition.start("trainer")
    until(lambda: versions(composition).get(2) == "live", lambda: "version 2 did not go live", START_SECONDS)
    assert [answer(openai, model, n) for n in range(6)] == first[:6]
    back = composition.execute("serve", ["redraft", "rollback", "--reason", "a test"])
    assert back.returncode == 0, back.stderr
    assert versions(composition) == {1: "live", 2: "rolled_back"}


def test_nothing_is_written_outside_the_volumes(composition: Composition) -> None:
    """The containers' file systems are read-only but for the volumes and /tmp."""
    assert not (composition.folder / "nobody").exists()
    assert newer_than(composition.log("serve").parent / "target", CHECKOUT) == []


@pytest.mark.parametrize("name", LASTING)
def test_a_service_stops_when_it_is_asked_to(composition: Composition, name: str) -> None:
    assert composition.stop(name) in CLEAN_EXITS, composition.log(name).read_text()


def answer(openai: OpenAI, model: str, number: int) -> str:
    reply = openai.completions.create(model=model, prompt=f"prompt {number}", temperature=0, max_tokens=24)
    return reply.choices[0].text


def versions(composition: Composition) -> dict[int, str]:
    """Number and state, as the operator's command shows them."""
    shown = composition.execute("serve", ["redraft", "versions", "--json"])
    assert shown.returncode == 0, shown.stderr
    return {row["number"]: row["state"] for row in json.loads(shown.stdout)}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def newer_than(mark: Path, folder: Path) -> list[Path]:
    """Files of the checkout itself that were made after `mark`; caches of the tools do not count."""
    found = [path for path in folder.iterdir() if not path.name.startswith(".") and path.is_file()]
    return [path for path in found if path.stat().st_mtime > mark.stat().st_mtime]
