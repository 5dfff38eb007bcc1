"""Structured output: which tokens a grammar allows next, by llguidance. Grammars are in its Lark (docs/syntax.md)."""

import re
from collections import OrderedDict
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from master.api.failures import RequestError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from master.text.tokenizer import Tokenizer

F32 = npt.NDArray[np.float32]

_WORD = 32  # tokens in a number of the mask
_MOST_GRAMMAR = 1 << 17  # characters
_MOST_SYMBOLS = 12_000  # of a grammar, some 1500 optional properties: the time to compile grows with their square
_PLACE = re.compile(r"^at \d+\(\d+\): (failed to compile JSON schema: )?")
_QUOTED = re.compile(r"\n +\d+ \| ")
_KEYS = re.compile(r"Unimplemented keys: \[(.*)\]")
_KEPT = 16  # grammars that were asked for last, of no more characters together than one may have


class GrammarConstraint:
    """Follows one answer; see `master.generation.sampler.Constraint`."""

    def __init__(self, matcher: "LLMatcher", vocab: int) -> None:
        self._matcher, self._vocab = matcher, vocab
        self._mask = np.zeros(-(-vocab // _WORD), np.int32)

    def copy(self) -> "GrammarConstraint":
        """One for another answer, in the state of this one."""
        return GrammarConstraint(self._matcher.deep_copy(), self._vocab)

    def allow(self, logits: F32) -> F32:
        """`logits` `[vocab]`, minus infinity for what may not come; at its end only the end of turn may."""
        self._matcher.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)
        if self._matcher.is_error():
            said = " ".join(self._matcher.get_error().split())[:300]
            raise RequestError(f"the grammar cannot be followed any further: {said}", code="grammar_failed")
        allowed = np.unpackbits(self._mask.view(np.uint8), bitorder="little")[: logits.size].view(np.bool_)
        return np.where(allowed, logits, np.float32(-np.inf))

    def accept(self, token: int) -> None:
        """It came; the end of turn is none of the grammar's tokens where the grammar is over."""
        if not self._matcher.is_stopped():
            self._matcher.consume_token(token)


class Grammars:
    """Compiles grammars for one tokenizer, and keeps the last ones. From one thread at a time."""

    def __init__(self, tokenizer: "Tokenizer", vocab: int) -> None:
        """`vocab`: logits of a token."""
        self._source = tokenizer
        self._vocab = vocab
        self._kept: OrderedDict[str, GrammarConstraint] = OrderedDict()

    def compiled(self, lark: str, field: str, name: str = "") -> GrammarConstraint:
        """A constraint that an answer is what `lark` says, to be copied; `field` is where the user said it.

        `name`: what errors call it, by default the field.

        Raises:
            RequestError: if it is no valid grammar, or one that is too large.
        """
        if (found := self._kept.get(lark)) is None:
            found = self._kept[lark] = self._compile(lark, field, name or field)
        self._kept.move_to_end(lark)
        while len(self._kept) > _KEPT or (len(self._kept) > 1 and sum(map(len, self._kept)) > _MOST_GRAMMAR):
            self._kept.popitem(last=False)
        return found

    def _compile(self, lark: str, field: str, name: str) -> GrammarConstraint:
        if len(lark) > _MOST_GRAMMAR:
            said = f"{name} is over the limit of {_MOST_GRAMMAR} characters; ask for less"
            raise RequestError(said, field, "invalid_value")
        from llguidance import LLMatcher, LLParserLimits, grammar_from

        limits = LLParserLimits(max_grammar_size=_MOST_SYMBOLS, verbose_errors=False)
        matcher = LLMatcher(self._tokenizer, grammar_from("lark", lark), log_level=0, limits=limits)
        if matcher.is_error():
            raise _refused(matcher.get_error(), field, name)
        return GrammarConstraint(matcher, self._vocab)

    def prepare(self) -> None:
        """Load what the first grammar would have to wait for: a quarter of a second, and 33 MiB at SmolLM2's size."""
        assert self._tokenizer

    @cached_property
    def _tokenizer(self) -> "LLTokenizer":
        from llguidance import LLTokenizer

        ends = sorted(self._source.eos_ids)
        return LLTokenizer(self._source.definition, n_vocab=self._vocab, eos_token=ends or None)


def _refused(said: str, field: str, name: str) -> RequestError:
    """What is told of a grammar that cannot be compiled, of which llguidance `said` why."""
    if "too big" in said or "too large" in said:
        return RequestError(f"{name} makes too large a grammar; ask for less", field, "invalid_value")
    return RequestError(f"{name} cannot be made a grammar: {_reason(said)}", field, "invalid_value")


def _reason(said: str) -> str:
    """Return why, without the grammar that the message quotes."""
    reason = _QUOTED.split(said.strip(), maxsplit=1)[0]
    reason = " ".join(_PLACE.sub("", reason).split())
    keys = _KEYS.fullmatch(reason)
    return f"the keyword {keys[1].replace(chr(34), '')} is not supported" if keys else reason[:300]
