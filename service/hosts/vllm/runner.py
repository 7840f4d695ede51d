"""What vLLM's model runner knows of the rows beside their tokens: whose they are, what was verified, who has finished.

The contract of a `custom_class` proposer shows tokens only. The rest is read where the runner keeps it, before each
step. Nothing is changed there, and where it is not found the proposer still proposes: only its records are missing.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Step:
    """What the scheduler said of the step that runs now."""

    runner: Any
    verified: dict[str, list[int]] = field(default_factory=dict)  # by request id, the proposals that are verified

    def ids(self, rows: int) -> list[str]:
        """The ids of the batch's rows."""
        return [str(request_id) for request_id in self.runner.input_batch.req_ids[:rows]]

    def state(self, request_id: str) -> Any:
        """The runner's own state of a request."""
        return self.runner.requests[request_id]

    def proposal(self, request_id: str) -> list[int]:
        """The proposed tokens that this step verifies, without those that a grammar struck out."""
        return [token for token in self.verified.get(request_id, ()) if token >= 0]


Listener = Callable[[Any, Any], None]  # the runner, and the scheduler's output of the step that begins


def listen(runner_class: Any, listener: Listener) -> None:
    """Call `listener` before each step of any runner of the class. It must not raise."""
    original = runner_class._update_states

    @functools.wraps(original)
    def told(runner: Any, scheduled: Any, *args: Any, **kwargs: Any) -> Any:
        listener(runner, scheduled)
        return original(runner, scheduled, *args, **kwargs)

    runner_class._update_states = told


def began(scheduled: Any) -> list[str]:
    """The requests that this step sees for the first time."""
    return [str(request.req_id) for request in scheduled.scheduled_new_reqs]


def finished(of: Any, scheduled: Any) -> list[tuple[str, list[int]]]:
    """The requests that ended since the step before, with their outputs, which may go on past the end."""
    ended = [(str(request_id), of.requests.get(request_id)) for request_id in scheduled.finished_req_ids]
    return sorted((request_id, [] if state is None else list(state.output_token_ids)) for request_id, state in ended)
