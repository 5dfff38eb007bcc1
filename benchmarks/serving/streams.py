"""The cost of simultaneous streams, of a long prompt next to them, of a further turn, and of structured output."""

import asyncio
from statistics import median
from time import perf_counter
from typing import Any

import httpx

from benchmarks.result import Check, Result, Row, Table
from benchmarks.serving.gaps import gaps_beside
from benchmarks.serving.server import CHAT, Running, question, running, together

NOTES = """
`tpi serve` with SmolLM2-135M in Q4_1 on one node, asked over HTTP on the same machine. The clients share its cores.

- *Streams*: greedy answers of equal length to different questions at once. Figures are tokens per second of all
  streams, and their ratio to one stream.
- *A long prompt*: 4000 tokens, measured on the engine itself. Figures are the longest and the usual time that another
  answer waits for its next token. The unit is the time of a chunk of 512 tokens of the long prompt alone. Times are CPU
  times of the process.
- *A further turn*: seconds to the first token of the second turn, divided by those of the first turn.
- *Structure*: tokens per second of JSON that follows a schema, divided by those of free text of the same length.
"""
_SCHEMA = {"type": "array", "items": {"type": "string", "maxLength": 30}, "minItems": 40}
_LIMIT_MS = 100.0


def bench(quick: bool) -> Result:
    """Measure the served streams; with fewer tokens if `quick`."""
    tokens = 16 if quick else 64
    with running("-c", "8192", "--parallel", "2") as server:
        rates = stream_rates(server, tokens)
        again = _further_turn(server, 300 if quick else 1700)
        structured = _structure(server, tokens)
        refused = _refusals(server)
    gaps = gaps_beside(1000 if quick else 4000)
    one: list[Row] = [
        {"": "longest gap of an answer beside a long prompt, in chunks of that prompt alone", "value": gaps.longest},
        {"": "usual gap there", "value": gaps.usual},
        {"": "time of the long prompt beside an answer, against alone", "value": gaps.slower},
        {"": "second turn's first token against the first turn's", "value": again},
        {"": "tokens per second of JSON of a schema, against free text", "value": structured},
        {"": "slowest refusal of bad input, ms", "value": refused},
    ]
    promised = [
        Check("eight streams against one", rates[8] / rates[1], 2.2),
        Check("gap beside a long prompt, in chunks", gaps.longest, 2.0, at_most=True),
        Check("second turn's first token, of the first's", again, 0.1, at_most=True),
        Check("structured tokens per second, of free ones", structured, 0.95),
        Check("ms to refuse bad input", refused, _LIMIT_MS, at_most=True),
    ]
    tables = [Table("Streams at once", stream_rows(rates)), Table("One thing beside another", one)]
    return Result("Serving", NOTES, tables, promised)


def stream_rates(server: Running, tokens: int) -> dict[int, float]:
    """Return the total tokens per second of 1, 4 and 8 simultaneous answers of `tokens` tokens each."""
    rates: dict[int, float] = {}
    for count in (1, 1, 4, 8):  # the first one warms up
        bodies = [question(f"Tell me of the number {count * 10 + n}.", tokens) for n in range(count)]
        heard = asyncio.run(together(server.url, bodies))
        made = sum(one.usage["completion_tokens"] - 1 for one in heard)
        spans = max(one.times[-1] for one in heard) - min(one.times[0] for one in heard)
        rates[count] = made / spans
    return rates


def stream_rows(rates: dict[int, float]) -> list[Row]:
    """Return a row of the table for each number of streams."""
    return [{"streams": count, "tok/s": rate, "against one": rate / rates[1]} for count, rate in rates.items()]


def _further_turn(server: Running, words: int) -> float:
    text = "So it went on: " + " ".join(f"and {n}" for n in range(words // 3))
    (first,) = asyncio.run(together(server.url, [question(text, 8)]))
    turns = [
        {"role": "user", "content": text},
        {"role": "assistant", "content": first.text},
        {"role": "user", "content": "And then?"},
    ]
    (second,) = asyncio.run(together(server.url, [question("", 8, messages=turns)]))
    return second.first / first.first


def _structure(server: Running, tokens: int) -> float:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": _SCHEMA}}
    asyncio.run(together(server.url, [question("List animals.", 4, response_format=form)]))  # warms up
    rates: list[float] = []
    for more in ({}, {"response_format": form}):
        (heard,) = asyncio.run(together(server.url, [question("List animals.", 2 * tokens, **more)]))
        rates.append((heard.usage["completion_tokens"] - 1) / (heard.times[-1] - heard.times[0]))
    return rates[1] / rates[0]


def _refusals(server: Running) -> float:
    """Return the milliseconds of the slowest of several refusals, each tried a few times."""
    bad: list[dict[str, Any]] = [
        question("x " * 100_000, 5), question("Hi", -1), question("Hi", 5, model="none"), {"messages": 5},
        question("Hi", 5, response_format={"type": "json_schema", "json_schema": {"schema": {"type": "none"}}}),
    ]  # fmt: skip
    slowest = 0.0
    with httpx.Client(base_url=server.url, timeout=60) as http:
        http.get("/health")
        for body in bad:
            taken = []
            for _ in range(5):
                begun = perf_counter()
                status = http.post(CHAT, json=body).status_code
                assert 400 <= status < 500, status
                taken.append(perf_counter() - begun)
            slowest = max(slowest, median(taken))
    return 1e3 * slowest
