"""A workload under measurement: prompts as token ids, spread evenly over its file."""

from collections.abc import Sequence
from dataclasses import dataclass

from adapter.sample import chat_prompt
from adapter.target import Target


class NoPrompts(ValueError):
    """A workload has too few prompts that can be used."""


@dataclass(frozen=True)
class Workload:
    """A label and its prompts."""

    name: str
    prompts: tuple[tuple[int, ...], ...]

    @property
    def longest(self) -> int:
        return max(map(len, self.prompts))


def workload(name: str, texts: Sequence[str], target: Target, count: int, room: int) -> Workload:
    """`count` prompts of at most `room` tokens, taken at even steps, as files are grouped by topic.

    Raises `NoPrompts` where there are fewer: a prompt sent twice would make acceptance look better.
    """
    usable = [ids for text in texts if 0 < len(ids := tuple(chat_prompt(target, text))) <= room]
    if len(usable) < count:
        raise NoPrompts(
            f"workload {name} has {len(usable)} prompts of at most {room} tokens, and {count} requests are asked for: "
            "ask for fewer, or for a smaller --max-tokens"
        )
    return Workload(name, tuple(usable[i * len(usable) // count] for i in range(count)))
