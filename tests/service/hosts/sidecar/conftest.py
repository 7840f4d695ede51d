"""One sidecar before our own server, for all tests of a file that only ask."""

from collections.abc import Iterator

import pytest

from tests.service.hosts.sidecar.rig import Rig, beside


@pytest.fixture(scope="module")
def rig(openai_address: str) -> Iterator[Rig]:
    """Observes every request."""
    with beside(openai_address) as rig:
        yield rig
