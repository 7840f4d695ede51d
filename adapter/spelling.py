"""How the target spells: the bytes behind each of its tokens. Grammars and reported log-probabilities rest on it.

Made once a target from its tokenizer; byte-level and sentence-piece vocabularies come out alike.
"""

from dataclasses import dataclass

from llguidance import LLTokenizer
from llguidance.hf import from_tokenizer

from adapter.target import Target


class NotSpelled(ValueError):
    """A tokenizer that does not say which bytes its tokens stand for."""


@dataclass(frozen=True)
class Spelling:
    """The tokens of one target."""

    tokenizer: LLTokenizer
    known: int  # ids of the tokenizer; the model's vocabulary may be padded beyond them
    vocab_size: int  # of the model: the width of its logits
    eos_ids: frozenset[int]

    def token_bytes(self, token: int) -> bytes | None:
        """What a token stands for, alone: its bytes may be part of a character. None for a row of padding."""
        return self.tokenizer.decode_bytes([token]) if token < self.known else None

    def is_special(self, token: int) -> bool:
        """Whether a token leaves no trace in the text, such as the end of it."""
        return token >= self.known or self.tokenizer.is_special_token(token)


def spelling(target: Target) -> Spelling:
    """The spelling of a target; a fraction of a second for 50,000 tokens."""
    known = len(target.tokenizer)
    try:
        tokenizer = from_tokenizer(
            target.tokenizer, n_vocab=max(target.vocab_size, known), eos_token=sorted(target.eos_ids) or None
        )
    except ValueError as error:
        raise NotSpelled(f"the tokenizer of {target.files.name} does not tell its tokens' bytes: {error}") from error
    return Spelling(tokenizer, known, target.vocab_size, target.eos_ids)
