"""Answers after ten idle minutes, of a server, a page and a chat in a terminal, each with workers."""

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event
from time import perf_counter

import httpx

from benchmarks.result import Check, Result, Row, Table
from benchmarks.serving.server import CHAT, Running, question, running
from benchmarks.support.models import smollm2
from tests.support.browser import DESKTOP, ENTER, MISSING, Browser, chromium
from tests.support.house import Laptop, house
from tests.support.terminal import Terminal, terminal

NOTES = """
SmolLM2-135M. Three clients ask a server that has two workers: a program over HTTP, a page that stays open in a headless
Chromium, and `tpi chat --url`. A fourth client is a `tpi chat` with two workers of its own. Each client asks, waits for
ten minutes of real time, and asks again. Figures are seconds to the whole answer of at most 24 tokens. For the page
they are seconds to the first word; then the answer is stopped.
"""
_IDLE_S, _QUICK_S, _MOST_S = 600.0, 5.0, 10.0
_TOKENS = 24
_TEXT = "What is the capital of France?"


def bench(quick: bool) -> Result:
    """Measure all clients at once, so that they share one pause; it takes a few seconds if `quick`."""
    idle_s = _QUICK_S if quick else _IDLE_S
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        workers = stack.enter_context(house(folder, 4))
        asks = _asks(stack, folder, workers)
        before = {name: _seconds(ask) for name, ask in asks.items()}
        Event().wait(idle_s)
        after = {name: _seconds(ask) for name, ask in asks.items()}
        standing = sum(one.process is not None and one.process.poll() is None for one in workers)
    rows: list[Row] = [
        {"client": name, "the first answer, s": before[name], f"after {idle_s:.0f} s idle, s": after[name]}
        for name in asks
    ]
    checks = [Check(f"seconds to an answer after idling: {name}", after[name], _MOST_S, at_most=True) for name in asks]
    checks.append(Check("workers still running", standing, len(workers), within=0))
    return Result("Idle for ten minutes", NOTES, [Table("Answers after a pause", rows)], checks)


def _asks(stack: ExitStack, folder: Path, workers: list[Laptop]) -> Mapping[str, Callable[[], None]]:
    """Return, for each client by name, a function that asks the client a question and waits for the complete answer."""
    served, own = (",".join(one.address for one in pair) for pair in (workers[:2], workers[2:]))
    server = stack.enter_context(running("-c", "2048", "--workers", served))
    by_url = stack.enter_context(_chat("--url", server.url))
    by_itself = stack.enter_context(_chat("-m", str(smollm2().path), "-c", "2048", "--workers", own))
    asks = {
        "a server": lambda: _post(server),
        "tpi chat --url": lambda: _say(by_url),
        "tpi chat": lambda: _say(by_itself),
    }
    if not MISSING:
        page = stack.enter_context(_page(server, folder))
        asks["an open page"] = lambda: _type(page)
    return asks


def _seconds(ask: Callable[[], None]) -> float:
    begun = perf_counter()
    ask()
    return perf_counter() - begun


def _post(server: Running) -> None:
    body = question(_TEXT, _TOKENS, stream=False, stream_options=None)
    httpx.post(f"{server.url}{CHAT}", json=body, timeout=60).raise_for_status()


@contextmanager
def _chat(*flags: str) -> Iterator[Terminal]:
    command = [sys.executable, "-m", "tpi.cli", "chat", *flags, "--temp", "0", "-n", str(_TOKENS), "--no-history"]
    with terminal(command, os.environ | {"TERM": "dumb"}) as chat:
        chat.expect("leaves.")
        chat.expect("> ")
        yield chat


def _say(chat: Terminal) -> None:
    chat.type(f"{_TEXT}\n")
    chat.expect("the first after ")  # the line of figures
    chat.expect("> ")


@contextmanager
def _page(server: Running, folder: Path) -> Iterator[Browser]:
    with chromium(folder) as browser:
        browser.size(*DESKTOP)
        browser.open(server.url)
        browser.wait("document.getElementById('model').textContent !== 'TPI'")
        yield browser


def _type(page: Browser) -> None:
    seen = page.run("return document.querySelectorAll('.answer').length")
    page.run("document.getElementById('prompt').focus()")
    page.type(_TEXT, ENTER)
    page.wait(f"document.querySelectorAll('.answer .text')[{seen}]?.innerText.length")
    page.run("if (document.querySelector('.live')) document.getElementById('send').click()")  # it can be long
    page.wait("!document.querySelector('.live')")
