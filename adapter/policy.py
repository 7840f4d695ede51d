"""How a request wants its tokens chosen. One policy for target and drafter, so that p and q are processed alike."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Policy:
    """How a request wants its tokens sampled. Temperature 0 is greedy; top_k 0 and top_p 1 are off."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature <= 2.0:
            raise ValueError(f"temperature must lie between 0 and 2, not {self.temperature}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be 0 (off) or more, not {self.top_k}")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must lie above 0 and at most at 1, not {self.top_p}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0
