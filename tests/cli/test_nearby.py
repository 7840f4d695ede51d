"""Commands find the processes of this machine whatever proxy the environment names."""

import pytest

from cli.children import answers
from tests.service.hosts.sidecar.rig import Script, served


def test_a_proxy_of_the_environment_is_not_asked_for_a_process_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    with served(Script()) as address:
        assert answers(f"{address}/health/ready")
