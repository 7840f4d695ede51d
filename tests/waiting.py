"""How tests wait for what another thread or process brings about."""

import time
from collections.abc import Callable

PATIENCE = 120.0  # seconds; a machine that is busy with other things takes its time, and nobody waits for it in vain


def until(condition: Callable[[], bool], otherwise: Callable[[], str] = lambda: "", seconds: float = PATIENCE) -> None:
    """Wait for `condition`; a `TimeoutError` with what `otherwise` says where it does not come true."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"still not so after {seconds:g} s {otherwise()}".rstrip())
        time.sleep(0.01)
