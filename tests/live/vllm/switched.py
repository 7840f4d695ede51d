"""The proposer with its feedback switched off and on between runs of one server, for `overhead`.

Off, proposals and what they need of each request are the same; rounds, records and their writing are not.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from service.engine.floor import Proposed
from service.hosts.vllm.proposer import Proposer
from service.hosts.vllm.requests import Request, Requests, end_of

OFF = "feedback-off"  # a file in REDRAFT_HOME


class Quiet(Requests):
    """Knows of each request what proposing needs, and no more while `off`."""

    off = False

    def learn(
        self, request: Request, committed: Sequence[int], verified: Sequence[int], output: Sequence[int]
    ) -> Proposed | None:
        if not self.off:
            return super().learn(request, committed, verified, output)
        request.end = end_of(request.generation, committed)
        request.generation.output_ids.extend(committed)
        return None

    def proposed(self, request: Request, tokens: list[int], version: int, draft_ms: float) -> None:
        if not self.off:
            super().proposed(request, tokens, version, draft_ms)


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
            super()._finished(request)
