"""Short departures from the best choice, so that what was not played lately stays known, within a share of the time."""

from dataclasses import dataclass

SAVED = 3.0  # probes that the account may hold the means for


@dataclass(frozen=True)
class Plan:
    """A probe: some rounds of a draft length, and the milliseconds that they are expected to lose."""

    draft_length: int
    rounds: int
    loss: float


class Probes:
    """The account: a share of all time comes in, what probes lost against the best choice goes out."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._account = 0.0
        self._left = 0
        self.draft_length = 0

    @property
    def running(self) -> bool:
        return self._left > 0

    def offer(self, plan: Plan) -> bool:
        """Start a probe where the account allows."""
        self._account = min(self._account, SAVED * plan.loss)  # a long good time is no licence for a bad one
        if self.running or self._account < plan.loss:
            return False
        self.start(plan)
        return True

    def start(self, plan: Plan) -> None:
        """Start a probe whatever it loses."""
        self.draft_length, self._left = plan.draft_length, plan.rounds

    def stop(self) -> None:
        self._left = 0

    def account(self, ms: float, committed: int, worth: float) -> None:
        """Note a round; `worth` is the best choice's accepted progress, tokens a millisecond."""
        self._account += self._share * ms
        if self.running:
            self._left -= 1
            self._account -= ms - committed / worth
