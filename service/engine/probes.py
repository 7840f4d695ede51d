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
        self._waited = False  # for drafters that first had to look again
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
        self.draft_length, self._left, self._waited = plan.draft_length, plan.rounds, False

    def stop(self) -> None:
        self._left = 0

    def account(self, ms: float, committed: int, worth: float, proposed: bool = True) -> None:
        """Note a round; `worth` is the best choice's accepted progress, tokens a millisecond.

        After a plain spell drafters that follow the target propose from the second round on: the first is none of the
        probe's.
        """
        self._account += self._share * ms
        if self.running:
            self._account -= ms - committed / worth
            if proposed or self.draft_length == 0 or self._waited:
                self._left -= 1
            self._waited = True
