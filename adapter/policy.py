"""How a request wants its tokens chosen. One policy for target and drafter, so that p and q are processed alike."""

from dataclasses import dataclass

MOST_BIAS = 100.0  # OpenAI's own bound


@dataclass(frozen=True)
class Policy:
    """How a request wants its tokens chosen. Temperature 0 is greedy; every default but it is off."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0  # least probability, as a share of the likeliest token's
    repetition_penalty: float = 1.0  # over prompt and output
    presence_penalty: float = 0.0  # over the output
    frequency_penalty: float = 0.0  # over the output, once for each time
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token, what its logit gains)

    def __post_init__(self) -> None:
        _within("temperature", self.temperature, 0.0, 2.0)
        if self.top_k < 0:
            raise ValueError(f"top_k must be 0 (off) or more, not {self.top_k}")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must lie above 0 and at most at 1, not {self.top_p}")
        _within("min_p", self.min_p, 0.0, 1.0)
        if not 0.0 < self.repetition_penalty <= 10.0:
            raise ValueError(
                f"repetition_penalty must lie above 0 and at most at 10 (1 is off), not {self.repetition_penalty}"
            )
        _within("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _within("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        for token, bias in self.logit_bias:
            if token < 0:
                raise ValueError(f"logit_bias names tokens by ids of 0 or more, not {token}")
            _within("logit_bias", bias, -MOST_BIAS, MOST_BIAS)
        if len({token for token, _ in self.logit_bias}) < len(self.logit_bias):
            raise ValueError("logit_bias may name each token once")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def bucket(self) -> str:
        """The label that rounds are counted under; the same rule as a feedback record's."""
        return "greedy" if self.greedy else f"t{self.temperature:.1f}"

    @property
    def penalises(self) -> bool:
        """Whether a token's logit depends on the tokens before it."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def adjusts(self) -> bool:
        """Whether logits change before temperature: any penalty or bias."""
        return self.penalises or bool(self.logit_bias)

    @property
    def truncates(self) -> bool:
        """Whether the improbable tokens are cut away."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0


def _within(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ValueError(f"{name} must lie between {low:g} and {high:g}, not {value}")
