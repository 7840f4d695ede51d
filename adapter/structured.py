"""Structured output: a JSON schema, a regular expression, a choice or a grammar as masks over the target's tokens.

A client's wish becomes a grammar, and is compiled once a request, away from the engine; the engine then asks the
`GrammarConstraint` which tokens may follow the committed text and what was drafted after it. llguidance parses.
"""

import json
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Any

import llguidance
import numpy as np
import torch
from llguidance import LLMatcher, LLParserLimits
from torch import Tensor

from adapter.grammar_trial import trial
from adapter.spelling import Spelling

LARGEST = 64 * 1024  # characters of a grammar as the client wrote it
# Any layout that people write, but no endless blanks: small models fall into them where a grammar lets them.
WHITESPACE = r"[ \t\r\n]{1,40}"
LIMITS = LLParserLimits(verbose_errors=False)  # a client has no use for the parser's inside
TELLING = 500  # characters of the library's message that are passed on


class GrammarRefused(ValueError):
    """A grammar that cannot be used, and why."""


def json_grammar(schema: dict[str, Any] | bool, compact: bool = False) -> str:
    """The JSON values that fit `schema`; `compact`: without blanks between them."""
    options: Any = {"whitespace_flexible": False} if compact else {"whitespace_pattern": WHITESPACE}
    # llguidance takes objects only; true and false are schemas too.
    whole = {"allOf": [schema]} if isinstance(schema, bool) else schema
    try:
        text = json.dumps(whole)
    except RecursionError:
        raise GrammarRefused("the schema is nested too deeply") from None
    return _written(text, lambda: LLMatcher.grammar_from_json_schema(text, overrides=options))


def regex_grammar(pattern: str) -> str:
    """The texts that match `pattern` as a whole."""
    return _written(pattern, lambda: LLMatcher.grammar_from_regex(pattern))


def choice_grammar(choices: Sequence[str]) -> str:
    """One of the texts, to the letter."""
    # A single terminal, whose name Lark wants in capitals: the lexer takes thousands of texts, the parser does not.
    lark = "start: CHOICE\nCHOICE: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)
    return _written(lark, lambda: LLMatcher.grammar_from_lark(lark))


def free_grammar(text: str) -> str:
    """A context-free grammar in Lark's notation or in llama.cpp's (GBNF)."""
    return _written(text, lambda: llguidance.grammar_from("grammar", text))


def _written(source: str, write: Callable[[], str]) -> str:
    """The grammar in llguidance's own form; what makes no sense at all is refused here, the rest when compiled."""
    if len(source) > LARGEST:
        raise GrammarRefused(f"it has {len(source)} characters as JSON or text; at most {LARGEST} are served")
    try:
        return write()
    except ValueError as error:
        raise GrammarRefused(_brief(str(error))) from error


def _brief(message: str) -> str:
    return message.replace("<non-verbose/>", "").strip()[:TELLING]


def constrain(spelling: Spelling, grammar: str) -> "GrammarConstraint":
    """Compile a grammar for one output. Milliseconds as a rule, but seconds for the worst: nothing for an event loop.

    One that was not seen lately is tried first; what is too complex is refused.
    """
    if not spelling.eos_ids:
        raise GrammarRefused("the target has no end-of-text token, so that no grammar could end its output")
    if refusal := trial(grammar):
        raise GrammarRefused(_brief(refusal))
    constraint = GrammarConstraint(LLMatcher(spelling.tokenizer, grammar, log_level=0, limits=LIMITS), spelling)
    constraint.allowed(())  # much comes to light at the first token only
    if trouble := constraint.trouble(()):
        raise GrammarRefused(trouble)
    return constraint


class GrammarConstraint:
    """Keeps one output inside a grammar: `adapter.sampling.Constraint` for structured output.

    The end of text is allowed where the grammar may end, and nothing else once it must. A grammar that grows too
    complex for the parser midway ends the output; `fault` then says so, and the text is no whole one.
    """

    def __init__(self, matcher: LLMatcher, spelling: Spelling) -> None:
        self._matcher = matcher  # stands after the committed text
        self._probe = matcher.deep_copy()  # stands after the drafted tokens `_ahead`
        self._ahead: tuple[int, ...] = ()
        self._masks: dict[tuple[int, ...], Tensor] = {}  # of this round: drafting and verification ask alike
        self._troubles: dict[tuple[int, ...], str] = {}  # of this round: where the parser gave up
        self._vocab_size, self._eos_ids = spelling.vocab_size, spelling.eos_ids
        self._bits = np.zeros((spelling.tokenizer.vocab_size + 31) // 32, dtype=np.uint32)
        self._end = torch.zeros(spelling.vocab_size, dtype=torch.bool)
        self._end[sorted(spelling.eos_ids)] = True
        self._ended = False
        self.fault = ""

    def trouble(self, drafted: tuple[int, ...]) -> str:
        """Why the parser gave up after `drafted`; a fault only where the output comes to it."""
        return self._troubles.get(drafted, "")

    def allowed(self, drafted: Sequence[int]) -> Tensor:
        """The tokens [V] that may follow the committed text and `drafted`."""
        prefix = tuple(drafted)
        mask = self._masks.get(prefix)
        if mask is None:
            mask = self._masks[prefix] = self._mask(prefix)
        return mask

    def commit(self, tokens: Sequence[int]) -> None:
        """Go on from after these tokens."""
        if self._ended:
            return
        text = list(takewhile(lambda token: token not in self._eos_ids, tokens))
        self._ended = len(text) < len(tokens)
        whole = self._matcher.consume_tokens(text) and (not self._ended or self._matcher.is_accepting())
        if self._ended:
            self.fault = self.trouble(tuple(text))
        if not whole:
            self._ended = True
            self.fault = self.fault or _brief(self._matcher.get_error()) or "the text left the grammar"
        self._restart()
        self._masks.clear()
        self._troubles.clear()

    def _mask(self, drafted: tuple[int, ...]) -> Tensor:
        if self._ended or not self._eos_ids.isdisjoint(drafted) or not self._follow(drafted):
            return self._end
        self._probe.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
        mask = np.unpackbits(self._bits.view(np.uint8), count=self._vocab_size, bitorder="little").view(np.bool_)
        if self._probe.is_error() or not mask.any():
            self._troubles[drafted] = _brief(self._probe.get_error()) or "no token of the target can follow"
            self._restart()
            return self._end
        return torch.from_numpy(mask)

    def _follow(self, drafted: tuple[int, ...]) -> bool:
        """Bring the probe to just after `drafted`; false where the grammar does not go there."""
        if drafted[: len(self._ahead)] != self._ahead:
            self._restart()
        new = list(drafted[len(self._ahead) :])
        taken = self._probe.try_consume_tokens(new)
        self._ahead = drafted
        if taken < len(new):
            self._restart()
        return taken == len(new)

    def _restart(self) -> None:
        """Back to the committed text. A copy shares the lexer, and takes microseconds."""
        self._probe, self._ahead = self._matcher.deep_copy(), ()


class MinimumLength:
    """Keeps one output from ending before it has `count` tokens: `adapter.sampling.Constraint` for min_tokens."""

    def __init__(self, count: int, ends: frozenset[int], vocab_size: int) -> None:
        self._count, self._committed = count, 0
        self._open = torch.ones(vocab_size, dtype=torch.bool)
        self._shut = self._open.clone()
        self._shut[sorted(ends)] = False

    def allowed(self, drafted: Sequence[int]) -> Tensor:
        """Every token [V], but no end as long as the output is too short."""
        return self._shut if self._committed + len(drafted) < self._count else self._open

    def commit(self, tokens: Sequence[int]) -> None:
        """Count these tokens."""
        self._committed += len(tokens)
