"""Streams side by side, a long prompt beside them, a further turn, structure: what each costs; and a crowd."""

import asyncio
from collections import Counter
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
stream. A long prompt: the longest gap in another answer meanwhile, in steps (part of a prompt, a token of each answer).
A further turn: seconds to the first token of the second turn against the first. Structure: tokens per second of JSON of
a schema against free text of that length. A crowd: clients at once, one in ten reading slowly.
"""
_SCHEMA = {"type": "array", "items": {"type": "string", "maxLength": 30}, "minItems": 40}
_LIMIT_MS = 100.0
_MEMORY_MIB = 200.0
_HEALTH_MS = 200.0


def bench(quick: bool) -> Result:
    """All of it; `quick` with few tokens and a small crowd."""
    tokens, crowd = (16, 50) if quick else (64, 1000)
    with running("-c", "8192", "--parallel", "2") as server:
        streams, eight = _streams(server, tokens)
        gap = _gap(server, 400 if quick else 3500)
        again = _further_turn(server, 300 if quick else 1700)
        structured = _structure(server, tokens)
        refused = _refusals(server)
    with running("-c", "1024", "--parallel", "4", "--queue", str(2 * crowd)) as server:
        crowds, checks = _crowd(server, crowd)
    one: list[Row] = [
        {"": "longest gap beside a long prompt, in its steps", "value": gap},
        {"": "second turn's first token against the first turn's", "value": again},
        {"": "tokens per second of JSON of a schema, against free text", "value": structured},
        {"": "slowest refusal of bad input, ms", "value": refused},
    ]
    promised = [
        Check("eight streams against one", eight, 2.2),
        Check("gap beside a long prompt, in steps", gap, 2.0, at_most=True),
        Check("second turn's first token, of the first's", again, 0.1, at_most=True),
        Check("structured tokens per second, of free ones", structured, 0.95),
        Check("ms to refuse bad input", refused, _LIMIT_MS, at_most=True),
        *checks,
    ]
    tables = [Table("Streams at once", streams), Table("One thing beside another", one), Table("A crowd", crowds)]
    return Result("Serving", NOTES, tables, promised)


def _streams(server: Running, tokens: int) -> tuple[list[Row], float]:
    rows: list[Row] = []
    rates: dict[int, float] = {}
    for count in (1, 1, 4, 8):  # the first one warms up
        bodies = [question(f"Tell me of the number {count * 10 + n}.", tokens) for n in range(count)]
        heard = asyncio.run(together(server.url, bodies))
        made = sum(one.usage["completion_tokens"] - 1 for one in heard)
        spans = max(one.times[-1] for one in heard) - min(one.times[0] for one in heard)
        rates[count] = made / spans
    for count, rate in rates.items():
        rows.append({"streams": count, "tok/s": rate, "against one": rate / rates[1]})
    return rows, rates[8] / rates[1]


def _gap(server: Running, words: int) -> float:
    """The longest gap of an answer while a long prompt is computed, in the time of one step of that prompt."""

    async def both() -> tuple[float, float]:
        async with httpx.AsyncClient(base_url=server.url, timeout=900) as http:
            answer = asyncio.ensure_future(ask(http, question("Count as far as you can.", 400)))
            await asyncio.sleep(0.5)
            long = await ask(http, question(" ".join(f"{n}" for n in range(words // 2)), 1))
            heard = await answer
            inside = [at for at in heard.times if long.begun <= at <= long.times[0]]
            gaps: list[float] = [b - a for a, b in pairwise(inside)]
            return max(gaps), median(gaps)

    longest, step = asyncio.run(both())
    return float(longest / step)


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


def _crowd(server: Running, count: int) -> tuple[list[Row], list[Check]]:
    """So many at once; who reads slowly pauses after every line."""
    idle = server.mib
    peak, pings = [idle], list[float]()

    async def watch(over: asyncio.Event) -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
            while not over.is_set():
                begun = perf_counter()
                (await http.get("/health")).raise_for_status()
                pings.append(perf_counter() - begun)
                peak.append(server.mib)
                await asyncio.sleep(0.1)

    async def all_of_them() -> Counter[str]:
        over = asyncio.Event()
        watching = asyncio.ensure_future(watch(over))
        bodies = [question(f"Say {n}.", 8) for n in range(count)]
        heard = await together(server.url, bodies, dict.fromkeys(range(0, count, 10), 0.5))
        over.set()
        await watching
        return Counter(one.end or "cut" for one in heard)

    begun = perf_counter()
    ends = asyncio.run(all_of_them())
    worst = 1e3 * sorted(pings)[int(0.99 * (len(pings) - 1))]
    grown = max(peak) - idle
    rows: list[Row] = [
        {
            "clients": count,
            "done": ends["done"],
            "told to come back": ends["429"],
            "other ends": _others(ends),
            "s": perf_counter() - begun,
            "/health p99 ms": worst,
            "MiB above idle": grown,
        }
    ]
    checks = [
        Check("streams of a crowd that end otherwise", _others(ends), 0, within=0),
        Check("MiB above idle in a crowd", grown, _MEMORY_MIB, at_most=True),
        Check("ms of /health in a crowd, p99", worst, _HEALTH_MS, at_most=True),
    ]
    return rows, checks


def _others(ends: Counter[str]) -> int:
    """Streams that neither ended well nor were told to come back."""
    return sum(ends.values()) - ends["done"] - ends["429"]
