"""Streams side by side, a long prompt beside them, a further turn, structure: what each costs."""

import asyncio
from itertools import pairwise
from statistics import median
from time import perf_counter
from typing import Any

import httpx

from benchmarks.result import Check, Result, Row, Table
from benchmarks.serving.server import CHAT, Running, ask, question, running, together

NOTES = """
`tpi serve` with SmolLM2-135M in Q4_1 on one node, asked over HTTP on the same machine, whose cores the clients share.
Streams: greedy answers of one length to different questions, at once; tokens per second of all of them, and against one
stream. A long prompt: about 4000 tokens; the longest gap in another answer meanwhile, and how many chunks of 512 tokens
of such a prompt would take as long, when it has the node to itself.
A further turn: seconds to the first token of the second turn against the first. Structure: tokens per second of JSON of
a schema against free text of that length.
"""
_SCHEMA = {"type": "array", "items": {"type": "string", "maxLength": 30}, "minItems": 40}
_LIMIT_MS = 100.0
_CHUNK = 512  # tokens of a step of a prompt alone, `master.deployment.deploy.LONGEST_CHUNK`


def bench(quick: bool) -> Result:
    """All of it; `quick` with few tokens."""
    tokens = 16 if quick else 64
    with running("-c", "8192", "--parallel", "2") as server:
        rates = stream_rates(server, tokens)
        gap, chunks = _gap(server, 400 if quick else 2000)
        again = _further_turn(server, 300 if quick else 1700)
        structured = _structure(server, tokens)
        refused = _refusals(server)
    one: list[Row] = [
        {"": "longest gap of an answer beside a long prompt, s", "value": gap},
        {"": "the same in chunks of that prompt alone", "value": chunks},
        {"": "second turn's first token against the first turn's", "value": again},
        {"": "tokens per second of JSON of a schema, against free text", "value": structured},
        {"": "slowest refusal of bad input, ms", "value": refused},
    ]
    promised = [
        Check("eight streams against one", rates[8] / rates[1], 2.2),
        Check("gap beside a long prompt, in chunks", chunks, 2.0, at_most=True),
        Check("second turn's first token, of the first's", again, 0.1, at_most=True),
        Check("structured tokens per second, of free ones", structured, 0.95),
        Check("ms to refuse bad input", refused, _LIMIT_MS, at_most=True),
    ]
    tables = [Table("Streams at once", stream_rows(rates)), Table("One thing beside another", one)]
    return Result("Serving", NOTES, tables, promised)


def stream_rates(server: Running, tokens: int) -> dict[int, float]:
    """Tokens per second of 1, 4 and 8 answers of so many tokens at once, all of them together."""
    rates: dict[int, float] = {}
    for count in (1, 1, 4, 8):  # the first one warms up
        bodies = [question(f"Tell me of the number {count * 10 + n}.", tokens) for n in range(count)]
        heard = asyncio.run(together(server.url, bodies))
        made = sum(one.usage["completion_tokens"] - 1 for one in heard)
        spans = max(one.times[-1] for one in heard) - min(one.times[0] for one in heard)
        rates[count] = made / spans
    return rates


def stream_rows(rates: dict[int, float]) -> list[Row]:
    """A table of them."""
    return [{"streams": count, "tok/s": rate, "against one": rate / rates[1]} for count, rate in rates.items()]


def _gap(server: Running, words: int) -> tuple[float, float]:
    """The longest gap of an answer while a long prompt is computed: seconds, and in chunks of such a prompt alone."""

    async def both() -> tuple[float, float]:
        async with httpx.AsyncClient(base_url=server.url, timeout=900) as http:
            alone = await ask(http, question(" ".join(f"{n + words}" for n in range(words // 2)), 1))
            answer = asyncio.ensure_future(ask(http, question("Count as far as you can.", 600)))
            await asyncio.sleep(0.5)
            long = await ask(http, question(" ".join(f"{n}" for n in range(words // 2)), 1))
            heard = await answer
            inside = [at for at in heard.times if long.begun <= at <= long.times[0]]
            return max(b - a for a, b in pairwise(inside)), alone.first * _CHUNK / alone.usage["prompt_tokens"]

    longest, chunk = asyncio.run(both())
    return longest, longest / chunk


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
    asyncio.run(together(server.url, [question("List animals.", 4, response_format=form)]))  # loads what it needs
    rates: list[float] = []
    for more in ({}, {"response_format": form}):
        (heard,) = asyncio.run(together(server.url, [question("List animals.", 2 * tokens, **more)]))
        rates.append((heard.usage["completion_tokens"] - 1) / (heard.times[-1] - heard.times[0]))
    return rates[1] / rates[0]


def _refusals(server: Running) -> float:
    """The slowest of several refusals, ms; each is tried a few times."""
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
