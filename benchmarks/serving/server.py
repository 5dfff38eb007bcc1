"""A running `tpi serve` of SmolLM2, and requests to it."""

import asyncio
import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from time import perf_counter
from typing import Any

import httpx
import psutil

from benchmarks.support.models import smollm2

CHAT = "/v1/chat/completions"


@dataclass
class Heard:
    """One stream: the time of each piece of text (`perf_counter` seconds), its usage, and its end."""

    begun: float
    times: list[float] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)
    end: str = ""
    text: str = ""

    @property
    def first(self) -> float:
        """Seconds from the request to the first piece of text."""
        return self.times[0] - self.begun

    @property
    def gap(self) -> float:
        """The longest time between two pieces of text, in seconds."""
        return max((b - a for a, b in pairwise(self.times)), default=0.0)


@dataclass(frozen=True)
class Running:
    """A server's address, and its process."""

    url: str
    process: psutil.Process

    @property
    def mib(self) -> float:
        """Resident memory of the server, in MiB."""
        return float(self.process.memory_info().rss) / (1 << 20)


@contextmanager
def running(*flags: str) -> Iterator[Running]:
    """Run `tpi serve` on this machine until the end of the block."""
    command = [sys.executable, "-m", "tpi.cli", "serve", "-m", str(smollm2().path), "--port", "0", "-q", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        try:
            line = next(line for line in process.stdout if " is served at " in line)
            yield Running(re.findall(r"http://[^;\s]+", line)[0], psutil.Process(process.pid))
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


def question(text: str, tokens: int, **more: Any) -> dict[str, Any]:
    """Make a greedy chat completion that runs to its token limit."""
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": tokens, "temperature": 0, "stream": True}
    return body | {"ignore_eos": True, "stream_options": {"include_usage": True}, **more}


async def ask(http: httpx.AsyncClient, body: dict[str, Any], pause: float = 0.0) -> Heard:
    """Read one stream to its end, with a pause of `pause` seconds after each line."""
    heard = Heard(perf_counter())
    async with http.stream("POST", CHAT, json=body) as answer:
        if answer.status_code != 200:
            heard.end = str(answer.status_code)
            return heard
        async for line in answer.aiter_lines():
            _take(heard, line)
            if pause:
                await asyncio.sleep(pause)
    return heard


def _take(heard: Heard, line: str) -> None:
    if line == "data: [DONE]":
        heard.end = heard.end or "done"
    elif line.startswith("data: "):
        chunk = json.loads(line[6:])
        if "error" in chunk:
            heard.end = "error"
        for choice in chunk.get("choices") or ():
            if piece := choice["delta"].get("content"):
                heard.times.append(perf_counter())
                heard.text += piece
        heard.usage = chunk.get("usage") or heard.usage


async def together(url: str, bodies: list[dict[str, Any]], pauses: dict[int, float] | None = None) -> list[Heard]:
    """Send all requests at once and return their streams."""
    async with httpx.AsyncClient(base_url=url, timeout=900, limits=httpx.Limits(max_connections=None)) as http:
        pauses = pauses or {}
        return list(await asyncio.gather(*(ask(http, body, pauses.get(n, 0.0)) for n, body in enumerate(bodies))))
