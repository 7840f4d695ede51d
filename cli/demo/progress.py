"""What has happened so far: requests by version and workload, and the moves of the registry."""

import threading
from collections import defaultdict
from dataclasses import dataclass

from cli.demo.traffic import Answer, Failure
from storage.registry import Registry, VersionSummary


@dataclass
class Totals:
    """Counts of some requests."""

    requests: int = 0
    proposed: int = 0
    accepted: int = 0
    rounds: int = 0

    def add(self, answer: Answer) -> None:
        self.requests += 1
        self.proposed += answer.proposed
        self.accepted += answer.accepted
        self.rounds += answer.rounds

    @property
    def rate(self) -> float:
        return self.accepted / max(1, self.proposed)

    @property
    def length(self) -> float:
        return 1 + self.accepted / max(1, self.rounds)


class Progress:
    """Fed by the clients' threads, read by the view."""

    def __init__(self, registry: Registry, drafter: str, wanted: int) -> None:
        self._registry, self._drafter, self.wanted = registry, drafter, wanted
        self._lock = threading.Lock()
        self._answers: list[Answer] = []
        self._failures: list[Failure] = []

    def add(self, result: Answer | Failure) -> None:
        with self._lock:
            if isinstance(result, Answer):
                self._answers.append(result)
            else:
                self._failures.append(result)

    @property
    def answers(self) -> list[Answer]:
        """In the order in which they finished."""
        with self._lock:
            return list(self._answers)

    @property
    def failures(self) -> list[Failure]:
        with self._lock:
            return list(self._failures)

    def by_version(self) -> dict[tuple[int, str], Totals]:
        """Totals by (version of a request's last round, workload)."""
        found: dict[tuple[int, str], Totals] = defaultdict(Totals)
        for answer in self.answers:
            if answer.version is not None:
                found[answer.version, answer.workload].add(answer)
        return dict(sorted(found.items()))

    def versions(self) -> list[VersionSummary]:
        return self._registry.versions(self._drafter)
