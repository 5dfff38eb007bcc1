"""Structured output: llguidance finds the tokens that a grammar allows. Grammars are in llguidance's form of Lark."""

import re
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import sha256
from queue import SimpleQueue
from threading import Lock, RLock
from time import thread_time
from typing import TYPE_CHECKING
from weakref import finalize

import numpy as np
import numpy.typing as npt

from master.api.answers import trial
from master.api.failures import RequestError
from master.confined.process import ConfinedError, ConfinedProcess, NotTriedError
from tpi.errors import BusyError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from master.text.tokenizer import Tokenizer

F32 = npt.NDArray[np.float32]

_USUAL_S = 0.005  # processor time that each call for one token may take; only time beyond it counts as a delay
_WORD = 32  # tokens per integer of llguidance's mask
_MOST_GRAMMAR = 1 << 17  # length limit in characters
_PLACE = re.compile(r"^at \d+\(\d+\): (failed to compile JSON schema: )?")
_QUOTED = re.compile(r"\n +\d+ \| ")
_KEYS = re.compile(r"Unimplemented keys: \[(.*)\]")
AT_ONCE = 2
"""Number of grammars that are tried and compiled at once."""
_MOST_KEPT = 64 << 20  # bytes of the cached grammars
_MOST_LIVE = 384 << 20  # bytes of the cached grammars and of all those in use by answers
_CHARACTER = 512  # bytes of a cached grammar per character, in addition to the memory that its trial took
_REMEMBERED = 256  # number of refused grammars that are remembered


class GrammarConstraint:
    """The grammar state of one answer; a `master.vocabulary.sampler.Constraint`."""

    def __init__(self, matcher: "LLMatcher", vocab: int, share: "GrammarShare") -> None:
        """Wrap llguidance's matcher. `share` holds the grammar's memory until the last copy of this object is freed."""
        self._matcher, self._vocab, self.share = matcher, vocab, share
        self._mask = np.zeros(-(-vocab // _WORD), np.int32)

    def copy(self) -> "GrammarConstraint":
        """Return an independent constraint in the same state, for another answer."""
        return GrammarConstraint(self._matcher.deep_copy(), self._vocab, self.share)

    def allow(self, logits: F32) -> F32:
        """Return `logits` `[vocab]` with minus infinity for each token that the grammar does not allow.

        Where the grammar is complete, it allows only the end of turn.

        Raises:
            RequestError: if the grammar takes too long, or llguidance cannot continue.
        """
        if not self.share.is_slow:
            began = thread_time()
            self._matcher.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)
            self.share.spend(thread_time() - began)
        if self.share.is_slow:
            self.share.spend(0.0)
            raise RequestError("the grammar takes too long to follow; simplify it", code="grammar_failed")
        if self._matcher.is_error():
            said = " ".join(self._matcher.get_error().split())[:300]
            raise RequestError(f"the grammar failed during the answer: {said}", code="grammar_failed")
        allowed = np.unpackbits(self._mask.view(np.uint8), bitorder="little")[: logits.size].view(np.bool_)
        return np.where(allowed, logits, np.float32(-np.inf))

    def accept(self, token: int) -> None:
        """Advance the grammar by `token`. Ignore it if the grammar is complete: the end of turn is not part of it."""
        if not self._matcher.is_stopped():
            began = thread_time()
            self._matcher.consume_token(token)
            self.share.spend(thread_time() - began)

    def forced(self) -> list[int]:
        """Return the token ids of the text that must come next; empty if several texts may follow.

        The tokenization is llguidance's.
        """
        if self._matcher.is_stopped() or self.share.is_slow:
            return []
        began = thread_time()
        found = self._matcher.compute_ff_tokens()
        self.share.spend(thread_time() - began)
        return found

    def allowed(self, tokens: Sequence[int]) -> int:
        """Return how many of `tokens`, from the first on, the grammar allows; 0 if the grammar is complete."""
        if not tokens or self._matcher.is_stopped() or self.share.is_slow:
            return 0
        began = thread_time()
        found = self._matcher.validate_tokens(list(tokens))
        self.share.spend(thread_time() - began)
        return found


class GrammarShare:
    """The size of one compiled grammar in bytes, and the processor time by which it delays other answers.

    All other answers wait while the mask of a slow grammar is computed. One slow token is allowed, but not several in a
    row, and not one in each of many answers.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._late = 0.0  # seconds of processor time

    @property
    def is_slow(self) -> bool:
        """True if the grammar delayed other answers for too long. Each `spend(0)` reduces the delay."""
        return self._late > trial.SLOW_S

    def spend(self, seconds: float) -> None:
        """Add the processor time of one token, in seconds."""
        self._late = max(0.0, self._late + seconds - _USUAL_S)


class GrammarMemory:
    """Accounting for the memory of all grammars that are cached or in use by an answer."""

    def __init__(self, most: int) -> None:
        self._most, self._used = most, 0
        self._lock = RLock()  # a share may be collected while the lock is held

    def take(self, size: int) -> GrammarShare:
        """Return a share of `size` bytes. Its memory is given back when the share is garbage-collected.

        Raises:
            BusyError: if all shares together would exceed the limit.
        """
        with self._lock:
            if self._used + size > self._most:
                raise BusyError("grammars of other requests take all the memory for grammars; try again later")
            self._used += size
        share = GrammarShare(size)
        finalize(share, self._give_back, size)
        return share

    def _give_back(self, size: int) -> None:
        with self._lock:
            self._used -= size


class Grammars:
    """Compiler and cache of grammars for one tokenizer; safe to call from several threads.

    A client's grammar is first tried in a child process (`master.api.answers.trial`). Cached grammars, and the server's
    own, need no trial.
    """

    def __init__(self, tokenizer: "Tokenizer", vocab: int) -> None:
        """Create a compiler; `vocab` is the number of logits."""
        self._source, self._vocab = tokenizer, vocab
        self._own = dict[str, GrammarConstraint]()
        self._kept: OrderedDict[str, GrammarConstraint] = OrderedDict()
        self._costly: OrderedDict[bytes, None] = OrderedDict()
        self._trials = SimpleQueue[ConfinedProcess]()
        self._processes = [ConfinedProcess("master.api.answers.trial", {}, trial.LIMITS) for _ in range(AT_ONCE)]
        for process in self._processes:
            self._trials.put(process)
        self._room = GrammarMemory(_MOST_LIVE)
        self._lock, self._loading = Lock(), Lock()
        self._loaded: LLTokenizer | None = None

    def cached(self, lark: str) -> GrammarConstraint | None:
        """Return the compiled grammar if it is cached, else None."""
        with self._lock:
            if lark in self._own:
                return self._own[lark]
            found = self._kept.get(lark)
            if found is None:
                return None
            self._kept.move_to_end(lark)
            return found

    def compiled(self, lark: str, field: str, name: str = "") -> GrammarConstraint:
        """Return a constraint for the grammar `lark`, to be copied for each answer.

        Args:
            lark: the grammar.
            field: the request field that it comes from.
            name: the name for it in errors (default: `field`).

        Raises:
            RequestError: if the grammar is not valid, or takes too much time or memory.
            BusyError: if grammars of other requests take all the memory for grammars.
        """
        if (found := self.cached(lark)) is not None:
            return found
        name = name or field
        if len(lark) > _MOST_GRAMMAR:
            said = f"{name} is over the limit of {_MOST_GRAMMAR} characters; shorten it"
            raise RequestError(said, field, "invalid_value")
        share = self._room.take(self._tried(lark, field, name))
        made = self._compile(lark, field, name, share)
        with self._lock:
            self._kept[lark] = made
            while len(self._kept) > 1 and sum(one.share.size for one in self._kept.values()) > _MOST_KEPT:
                self._kept.popitem(last=False)
        return made

    def prepare(self, own: Iterable[str]) -> None:
        """Load llguidance and compile the server's own grammars, so that the first request need not wait for that.

        This takes a quarter of a second, and 33 MiB for SmolLM2's vocabulary.
        """
        made = {lark: self._compile(lark, "response_format", "response_format", GrammarShare(0)) for lark in own}
        with self._lock:
            self._own.update(made)
        self._processes[-1].start()

    def close(self) -> None:
        """Stop the child processes that compile grammars."""
        for process in self._processes:
            process.close()

    def _tried(self, lark: str, field: str, name: str) -> int:
        """Try the grammar in a child process and return its approximate size in bytes.

        Raises:
            RequestError: if the grammar takes too much memory or time.
            BusyError: if this machine is too busy to try the grammar.
        """
        key = sha256(lark.encode()).digest()
        if key in self._costly:
            raise _too_large(field, name)
        process = self._trials.get()
        try:
            return int(process.ask(lark)) + _CHARACTER * len(lark)
        except NotTriedError as error:
            raise BusyError(f"{name} could not be compiled: {error}") from None
        except ConfinedError:
            with self._lock:
                self._costly[key] = None
                while len(self._costly) > _REMEMBERED:
                    self._costly.popitem(last=False)
            raise _too_large(field, name) from None
        finally:
            self._trials.put(process)

    def _compile(self, lark: str, field: str, name: str, share: "GrammarShare") -> GrammarConstraint:
        from llguidance import LLMatcher, grammar_from

        limits = trial.parser_limits(lark)
        matcher = LLMatcher(self._tokenizer(), grammar_from("lark", lark), log_level=0, limits=limits)
        if matcher.is_error():
            raise _refused(matcher.get_error(), field, name)
        return GrammarConstraint(matcher, self._vocab, share)

    def _tokenizer(self) -> "LLTokenizer":
        with self._loading:
            if self._loaded is None:
                from llguidance import LLTokenizer

                ends = sorted(self._source.eos_ids)
                self._loaded = LLTokenizer(self._source.definition, n_vocab=self._vocab, eos_token=ends or None)
            return self._loaded


def _too_large(field: str, name: str) -> RequestError:
    return RequestError(f"{name} makes too large a grammar; simplify it", field, "invalid_value")


def _refused(said: str, field: str, name: str) -> RequestError:
    """Return the error for a grammar that cannot be compiled; `said` is llguidance's message."""
    if "too big" in said or "too large" in said:
        return _too_large(field, name)
    return RequestError(f"{name} cannot be compiled to a grammar: {_reason(said)}", field, "invalid_value")


def _reason(said: str) -> str:
    """Return the reason that llguidance's message gives, without the grammar that the message quotes."""
    reason = _QUOTED.split(said.strip(), maxsplit=1)[0]
    reason = " ".join(_PLACE.sub("", reason).split())
    keys = _KEYS.fullmatch(reason)
    return f"the keyword {keys[1].replace(chr(34), '')} is not supported" if keys else reason[:300]
