"""One vLLM worker's proposals: which version proposes for which request, what became of it, and what is proposed next.

The engine's thread calls `begins` and `step`; the follower's calls `take` and `hold`, which wait for a step to end.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import structlog

from adapter.drafters.learnt import LearntDrafter
from service.engine.floor import Broken, FloorConfig, Proposed
from service.engine.governor import GovernorConfig
from service.engine.residents import DEFAULT, Lane, Resident
from service.hosts.vllm import runner
from service.hosts.vllm.drafting import Asked, Bounds, Drafting, made_ready
from service.hosts.vllm.memory import Ints
from service.hosts.vllm.pace import Pace
from service.hosts.vllm.requests import Request, Requests
from service.placing import Offer

log = structlog.get_logger()

Finished = Callable[[Request], None]


class Core:
    """Proposals, and what is learnt of them. `finished` is called with each request that ended."""

    def __init__(
        self,
        bounds: Bounds,
        finished: Finished,
        floor: FloorConfig = FloorConfig(),
        governor: GovernorConfig = GovernorConfig(),
        fallback: Resident | None = None,
    ) -> None:
        """`fallback` proposes where no version does; it has no memory."""
        self._bounds, self._finished = bounds, finished
        self._pace = Pace(bounds.draft_length, governor)
        self._requests = Requests(bounds.context)
        self._lane = Lane(DEFAULT, floor)
        self._fallback = fallback
        self._drafting = {} if fallback is None else {fallback: Drafting(fallback, bounds)}
        self._step: runner.Step | None = None
        self._between = threading.Lock()  # held in a step, and for the moment of a swap
        self.faults: Counter[str] = Counter()

    def begins(self, of: Any, scheduled: Any) -> None:
        """A step of vLLM's model runner begins."""
        for request_id, output in runner.finished(of, scheduled):
            self._finish(request_id, output)
        self._requests.began(runner.began(scheduled))
        self._step = runner.Step(of, scheduled.scheduled_spec_decode_tokens)

    def step(self, committed: Sequence[Sequence[int]], lengths: Any, tokens: Any) -> list[list[int]]:
        """Take in what was committed for each row, and propose. A row's text is tokens[row, :lengths[row]]."""
        with self._between:
            at = [row for row, new in enumerate(committed) if new]
            requests = self._known(at, len(committed))
            self._pace.verified(requests, self._learn(at, requests, committed), len(at) == len(committed))
            texts: list[Ints] = [tokens[row, : int(lengths[row])] for row in at]
            chains: list[list[int]] = [[] for _ in committed]
            for row, chain in zip(at, self._propose(requests, texts), strict=True):
                chains[row] = chain
            return chains

    def take(self, offered: Offer[LearntDrafter]) -> None:
        """Swap. What takes time is done before the step is waited for."""
        resident, drafting = made_ready(offered.version.number, offered.drafter, self._bounds)
        with self._between:
            self._lane.swap(resident, offered.holdback, offered.guarded)
            self._drafting[resident] = drafting
            self._forget()
            self._pace.rearm()

    def hold(self, share: float) -> None:
        """Leave that share of the requests on the version that was offered before."""
        with self._between:
            self._lane.hold(share)
            self._forget()
            self._pace.rearm()

    def broken(self) -> Broken | None:
        """The version that was found below the floor, and gone back from."""
        return self._lane.floor.broken

    @property
    def version(self) -> int:
        """Of those that propose, the one that serves most requests; 0: none."""
        return self._lane.most.version if self._lane.most.drafter is not None else 0

    def _finish(self, request_id: str, output: Sequence[int]) -> None:
        try:
            request = self._requests.finish(request_id, output)
            if request is not None:
                self._finished(request)
        except Exception as error:  # one request's record; the others' are to be written
            self.fault("record", error)

    def _forget(self) -> None:
        """Memory only of versions that still propose."""
        kept = {*self._lane.all(), self._fallback}
        self._drafting = {resident: drafting for resident, drafting in self._drafting.items() if resident in kept}

    def _known(self, at: Sequence[int], rows: int) -> list[Request | None]:
        """Whose the rows are; None where that cannot be told, which costs the record and not the proposal."""
        step, ids = self._step, self._ids(rows)
        return [None if step is None or ids is None else self._request(step, ids[row]) for row in at]

    def _ids(self, rows: int) -> list[str] | None:
        try:
            return None if self._step is None else self._step.ids(rows)
        except Exception as error:
            self.fault("rows", error)
            return None

    def _request(self, step: runner.Step, request_id: str) -> Request | None:
        try:
            return self._requests.of(request_id, step.state(request_id))
        except Exception as error:
            self.fault("request", error)
            return None

    def _learn(
        self, at: Sequence[int], requests: Sequence[Request | None], committed: Sequence[Sequence[int]]
    ) -> list[Proposed]:
        """What became of the last proposals."""
        played = []
        for row, request in zip(at, requests, strict=True):
            if request is not None and self._step is not None:
                request_id = request.generation.request_id
                verified, output = self._step.proposal(request_id), self._step.state(request_id).output_token_ids
                proposed = self._requests.learn(request, committed[row], verified, output)
                if proposed is not None:
                    played.append(proposed)
        broken = self._lane.note([proposed for proposed in played if proposed.version])
        if broken is not None:
            log.warning("drafter.below_floor", version=broken.version, reason=broken.reason)
            self._forget()
            self._pace.rearm()
        return played

    def _propose(self, requests: Sequence[Request | None], texts: Sequence[Ints]) -> list[list[int]]:
        """A chain a row, from the version that serves its request."""
        chains: list[list[int]] = [[] for _ in texts]
        began, most = time.perf_counter(), self._pace.choose(requests)
        absorbed = sum(drafting.absorbed for drafting in self._drafting.values())
        residents: list[tuple[Resident, list[int]]] = list(self._by_version(requests).items())
        for resident, places in residents:
            asked = [self._asked(requests[place], texts[place], most) for place in places]
            for place, chain in zip(places, self._ask(resident, asked), strict=True):
                chains[place] = chain
        draft_ms = (time.perf_counter() - began) * 1e3
        for resident, places in residents:
            for place in places:
                request = requests[place]
                if request is not None:
                    self._requests.proposed(request, chains[place], resident.version, draft_ms)
        absorbed = sum(drafting.absorbed for drafting in self._drafting.values()) - absorbed
        width = max(map(len, chains), default=0)
        if width or not most:  # else all rows are still being caught up on
            self._pace.proposed(requests, width, draft_ms, max(absorbed, 0))
        return chains

    def _by_version(self, requests: Sequence[Request | None]) -> dict[Resident, list[int]]:
        """The rows of each version, or of the n-grams where there is none."""
        found: dict[Resident, list[int]] = {}
        for place, request in enumerate(requests):
            resident = self._lane.live if request is None else self._lane.of(request.generation.request_id)
            proposer = self._fallback if resident.drafter is None else resident
            if proposer is not None:
                found.setdefault(proposer, []).append(place)
        return found

    def _asked(self, request: Request | None, text: Ints, most: int) -> Asked:
        """No more is proposed than can be committed: the target adds a token of its own."""
        if request is None:
            return Asked(text, most)
        return Asked(text, max(0, min(most, request.left - 1)), request.generation.workload)

    def _ask(self, resident: Resident, asked: Sequence[Asked]) -> list[list[int]]:
        """One version's chains; a version that fails proposes no more, and is taken back where it was new."""
        try:
            return self._drafting[resident].propose(asked)
        except Exception as error:
            self.fault("drafter", error)
            broken = self._lane.failed(resident)
            if broken is not None:
                log.warning("drafter.below_floor", version=broken.version, reason=broken.reason)
            if resident is self._fallback:
                self._fallback = None
            self._forget()
            return [[] for _ in asked]

    def fault(self, where: str, error: Exception) -> None:
        """Count it; each kind is logged once, as it may come in every step."""
        kind = f"{where}: {type(error).__name__}"
        self.faults[kind] += 1
        if self.faults[kind] == 1:
            log.exception("vllm.fault", where=where)
