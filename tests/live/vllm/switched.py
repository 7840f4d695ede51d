"""The proposer with its feedback switched off and on between runs of one server, for `overhead`.

Off, proposals and what they need of each request are the same; rounds, records and their writing are not. Kept besides
is the processor time that feedback takes itself, which other work on the machine disturbs less than it does a speed.
"""

import json
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from service.engine.floor import Proposed
from service.hosts.vllm.proposer import Proposer
from service.hosts.vllm.requests import Request, Requests, end_of

OFF = "feedback-off"  # a file in REDRAFT_HOME
SPENT = "feedback-spent"  # another: seconds of processor time, those of feedback and those of all of the worker


class Quiet(Requests):
    """Knows of each request what proposing needs, and no more while `off`."""

    off = False
    spent = 0.0  # seconds of this thread

    def learn(
        self, request: Request, committed: Sequence[int], verified: Sequence[int], output: Sequence[int]
    ) -> Proposed | None:
        if not self.off:
            began = time.thread_time()
            found = super().learn(request, committed, verified, output)
            self.spent += time.thread_time() - began
            return found
        request.end = end_of(request.generation, committed)
        request.generation.output_ids.extend(committed)
        return None

    def proposed(self, request: Request, tokens: list[int], version: int, draft_ms: float) -> None:
        if not self.off:
            began = time.thread_time()
            super().proposed(request, tokens, version, draft_ms)
            self.spent += time.thread_time() - began


class Switched(Proposer):
    """Looks in each step whether feedback is off."""

    def _build(self, vllm_config: Any) -> None:
        super()._build(vllm_config)
        self._switch = Path(os.environ["REDRAFT_HOME"]) / OFF
        self._quiet = Quiet(vllm_config.model_config.max_model_len)
        if self._core is not None:
            self._core._requests = self._quiet

    def propose(self, *args: Any, **kwargs: Any) -> list[list[int]]:
        self._quiet.off = self._switch.exists()
        return super().propose(*args, **kwargs)

    def _finished(self, request: Request) -> None:
        if not self._quiet.off:
            began = time.thread_time()
            super()._finished(request)
            self._quiet.spent += time.thread_time() - began
        self._tell()

    def _tell(self) -> None:
        spent = self._quiet.spent + sum(map(_processor, (t for t in threading.enumerate() if t.name == "feedback")))
        file = Path(os.environ["REDRAFT_HOME"]) / SPENT
        file.with_suffix(".new").write_text(json.dumps([spent, time.process_time()]))
        file.with_suffix(".new").replace(file)


def _processor(thread: threading.Thread) -> float:
    """Seconds of processor time that a thread has had."""
    ticks = Path(f"/proc/self/task/{thread.native_id}/stat").read_text().rpartition(") ")[2].split()[11:13]
    return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")
