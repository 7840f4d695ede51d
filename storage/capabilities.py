"""What a server can do for a drafter, as it said of itself: kept with its beat, and read by `redraft hosts`.

A record of what was found, not of what is hoped for: a sidecar that asked its engine for log-probabilities and got
none says so here. The table of what each kind of host can do at best is `service/hosts/capabilities`.
"""

from dataclasses import asdict, dataclass
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

Rounds = Literal["exact", "reconstructed", "totals", "none"]
Teacher = Literal["logits", "top_k", "none"]
Swap = Literal["between_rounds", "pushed", "blue_green", "none"]
Losslessness = Literal["lossless", "lossy", "unknown"]


@dataclass(frozen=True)
class Capabilities:
    """What is observed of an engine's rounds, and what can be done to its drafter.

    `rounds`: counts of each round as the engine took them; put together out of what it says of a request; sums only.
    `teacher`: where rows of the target's distribution come from while serving: all of its logits, its top K in
    answers, or nowhere, so that the worker has to ask again (`REDRAFT_TEACHER`).
    `swap`: the engine takes a version between two rounds; it is pushed into an engine that pauses; another engine with
    the new version takes over from the old one; or no version is swapped.
    """

    rounds: Rounds
    rejected_tokens: bool  # whether refused tokens are seen, with their q
    teacher: Teacher
    hidden_states: bool
    swap: Swap
    kinds: tuple[str, ...]  # of drafters that can be served; "ngram" needs no weights
    engine: str = ""  # name and version as the engine says; empty where it says nothing
    losslessness: Losslessness = "unknown"  # lossy where a setting below changes the text
    lossy_settings: tuple[str, ...] = ()  # as the engine spells them, e.g. "rejection_sample_method=fly"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, plain: dict[str, Any] | None) -> "Capabilities | None":
        """None for servers that say nothing, or in words of another version of redraft."""
        try:
            return _PLAIN.validate_python(plain) if plain else None
        except ValidationError:
            return None


_PLAIN = TypeAdapter(Capabilities)
