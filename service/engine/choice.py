"""What the governor says of its decisions: to an operator (`redraft governor`), and to the metrics."""

from dataclasses import dataclass

from service.engine.lookups import Match


@dataclass(frozen=True)
class Choice:
    """What the governor does with rows of one class in a batch of one size, and why."""

    workload: str
    policy: str
    match: Match  # the rows' n-gram matches; none where they are not looked up
    batch: int
    draft_length: int  # chosen; 0: plain
    speculative: int  # the best draft length above 0
    nodes: int  # tokens a row of that best one; more than its draft length: a tree
    fixed: bool  # whether that tree has a form fitted to the workload, and is not grown by the drafter's confidence
    lookup: bool  # whether what followed the match is proposed
    joined: bool  # whether that is in one tree with the drafter's own
    survival: tuple[float, ...]  # P(at least j tokens accepted), j = 1..limit, of its kind
    speculative_ms: float  # a round of that length
    plain_ms: float  # a plain round
    speculative_progress: float  # tokens a ms, all rows together
    plain_progress: float
    rounds: int
    why: str

    @property
    def speed_up(self) -> float:
        """Of speculating over plain decoding, as predicted."""
        return self.speculative_progress / self.plain_progress
