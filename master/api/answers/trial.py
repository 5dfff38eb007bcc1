"""The trial of a grammar in a child process of `master.confined`, to find out if the server can safely compile it.

A grammar of 60 characters can take gigabytes and minutes. A grammar that passes is compiled again in the server, which
applies it token by token. A grammar that exceeds the limits never reaches the server.
"""

import json
import random
import re
from collections.abc import Callable, Iterator
from time import thread_time
from typing import TYPE_CHECKING, Any

from master.confined.process import Limits

if TYPE_CHECKING:
    from llguidance import LLParserLimits

LIMITS = Limits(seconds=0.75, memory=48 << 20, opening_seconds=30.0, opening_memory=2 << 30)
SLOW_S = 0.25  # limit of processor time for the mask of one token, in seconds
_STEPS = 64  # number of tokens to try
_WALK_S = 0.2  # time limit for trying tokens, in seconds
_MOST_EXPANDED = 50_000  # characters of a pattern with its counts written out
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_SLASHED = re.compile(r"^PATTERN: /(.*)/$", re.MULTILINE)
_COUNT = re.compile(r"\{(\d*)(?:,(\d*))?\}")
_ATOM = re.compile(r"\\.|\[\^?\]?(?:[^\]\\]|\\.)*\]|[^()*+?|^$]", re.DOTALL)
_TOKEN = re.compile(r"<\[\d+\]>")  # a control token, by its number in the model's vocabulary
_STAND_IN = "<[257]>"  # a control token in the vocabulary of bytes


def parser_limits(lark: str) -> "LLParserLimits":
    """Return llguidance's limits for the grammar `lark`: the work for one token and the memory of one answer."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        max_grammar_size=12_000,  # symbols, about 1500 optional properties: the time to compile grows with their square
        max_items_in_row=8_000,  # enough for the symbols of `max_grammar_size`
        max_lexer_states=min(25_000, 4_000 + len(lark) // 2),  # 1 to 2 kB each, during an answer
        step_lexer_fuel=100_000,  # about 7 ms
        verbose_errors=False,
    )


def open_work(settings: Any) -> Callable[[str], int]:
    """Load llguidance with a vocabulary of bytes and return a function that tries a grammar.

    The function returns the bytes of memory that the grammar took. It raises ValueError if a pattern repeats too much
    or a mask takes too long. A grammar that is not valid passes, because compiling it in the server fails at once.
    """
    import numpy as np
    import psutil
    from llguidance import LLMatcher, LLTokenizer, grammar_from

    tokenizer = LLTokenizer("byte")
    mask, process = np.zeros(-(-tokenizer.vocab_size // 32), np.int32), psutil.Process()

    def attempt(lark: str) -> int:
        if max(map(expanded, _patterns(lark)), default=0) > _MOST_EXPANDED:
            raise ValueError("a pattern repeats too much")
        before, chance = process.memory_info().rss, random.Random(0)
        grammar = grammar_from("lark", _TOKEN.sub(_STAND_IN, lark))
        matcher, ends = LLMatcher(tokenizer, grammar, log_level=0, limits=parser_limits(lark)), thread_time() + _WALK_S
        for _ in range(_STEPS):
            began = thread_time()
            if matcher.is_error() or matcher.is_stopped() or began > ends:
                break
            matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            if thread_time() - began > SLOW_S:
                raise ValueError(f"to find the tokens that may come next takes more than {SLOW_S} s")
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
            if not allowed.size:
                break
            matcher.consume_token(int(chance.choice(allowed)))
        return int(max(0, process.memory_info().rss - before))

    attempt("start: /(a|b){1,9}/")
    return attempt


def expanded(pattern: str) -> int:
    """Return the approximate length of a regular expression after its repetition counts are expanded, in characters."""
    open_groups, last, at = [0], 0, 0
    while at < len(pattern):
        if count := _COUNT.match(pattern, at):
            times = max(int(number or 1) for number in (count[1], count[2] or ""))
            open_groups[-1] += last * (times - 1)
            last, at = last * times, count.end()
        elif atom := _ATOM.match(pattern, at):
            open_groups[-1] += 1
            last, at = 1, atom.end()
        else:
            if pattern[at] == "(":
                open_groups.append(0)
            elif pattern[at] == ")" and len(open_groups) > 1:
                last = open_groups.pop()
                open_groups[-1] += last
            at += 1
    return sum(open_groups)


def _patterns(lark: str) -> Iterator[str]:
    """Yield the texts in a grammar that may be regular expressions with repetition counts."""
    for found in _STRING.finditer(lark):
        if "{" in found[0]:
            yield json.loads(found[0])
    for found in _SLASHED.finditer(lark):
        yield found[1]
