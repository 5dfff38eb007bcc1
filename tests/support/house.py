"""A house of real workers that are killed, frozen, woken and started again while a master answers."""

import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from secrets import token_bytes
from socket import socket

import psutil

from master.generation.client import Client
from master.generation.request import Sampled
from master.generation.thread import EngineRequest, Ticket
from master.session import Session
from master.vocabulary.sampler import Sampler, Sampling
from tests.support.cluster.cluster_helpers import REAL_WORKER, announced
from tests.support.paths import ROOT
from tpi.errors import TpiError

GREEDY = Sampling(temperature=0)
_STEP_S = 0.004  # about what a step of a tiny model takes
_LONG_S = 60.0


def lasting_address() -> str:
    """Return an address of this machine with three free ports that the system does not hand out for port 0.

    A port that the system hands out may belong to another process when a worker comes back.
    """
    drawn = random.SystemRandom()
    while True:
        port = drawn.randrange(10240, 32000)  # the system gives ports from 32768 on for port 0
        with ExitStack() as stack, suppress(OSError):
            for each in range(port, port + 3):
                stack.enter_context(socket()).bind(("127.0.0.1", each))
            return f"127.0.0.1:{port}"


@dataclass
class Laptop:
    """One worker, with the same address and cache each time it is started."""

    name: str
    cache: Path
    arguments: Sequence[str] = ()
    environment: dict[str, str] = field(default_factory=dict)
    address: str = field(default_factory=lasting_address)
    command: Sequence[str] = REAL_WORKER
    process: "subprocess.Popen[bytes] | None" = None

    def start(self) -> None:
        """Start the worker, and wait until it listens."""
        command = [*self.command, "--listen", self.address, "--name", self.name, "--cache", str(self.cache)]
        self.process = subprocess.Popen(
            [*command, *self.arguments], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            env=os.environ | self.environment,
        )  # fmt: skip
        self.address = announced(self.process)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the worker; after a kill, wait for its end."""
        assert self.process
        self.process.send_signal(number)
        if number == signal.SIGKILL:
            self.process.communicate()

    @property
    def memory(self) -> int:
        """The worker's resident memory in bytes."""
        assert self.process
        return int(psutil.Process(self.process.pid).memory_info().rss)

    def stop(self) -> None:
        """End the worker, frozen or not; if it died by itself, read its output and close its pipe."""
        if self.process is None:
            return
        self.process.kill()
        if self.process.stdout and not self.process.stdout.closed:
            self.process.communicate()


@contextmanager
def house(root: Path, count: int, *arguments: str) -> Iterator[list[Laptop]]:
    """Run `count` laptops, called a, b, c, ..., during the block."""
    laptops = [Laptop(chr(ord("a") + number), root / f"cache-{number}", arguments) for number in range(count)]
    try:
        for laptop in laptops:
            laptop.start()
        yield laptops
    finally:
        for laptop in laptops:
            laptop.stop()


def until(true: Callable[[], bool], seconds: float = 60) -> float:
    """Wait until `true` returns True; return the seconds that it took."""
    started, waited = time.monotonic(), threading.Event()
    while not true():
        assert time.monotonic() - started < seconds, "it never came to that"
        waited.wait(0.02)
    return time.monotonic() - started


def until_error(look: Callable[[], object], kind: type[TpiError]) -> TpiError:
    """Call `look` repeatedly until it raises an error of `kind`; return the error."""
    found: list[TpiError] = []

    def raised() -> bool:
        try:
            look()
        except kind as error:
            found.append(error)
        return bool(found)

    until(raised, 20)
    return found[0]


@dataclass
class TimedAnswer:
    """The tokens of an answer, and the longest pause between two of them in seconds."""

    tokens: list[int]
    pause: float


def timed_answer(
    session: Session, prompt: list[int], length: int, at: Callable[[int], None] = lambda count: None
) -> TimedAnswer:
    """Answer `prompt` greedily with `length` tokens; call `at` after each token with the number of tokens so far.

    Raises:
        TpiError: if the answer ended with an error.
    """
    speaker = _TokenTimer(at)
    with session.answering() as engine:
        engine.submit(
            Ticket(EngineRequest(prompt, Sampler(GREEDY), length, client=Client(salt=token_bytes(8))), speaker)
        )
        speaker.over.wait()
    if speaker.error is not None:
        raise speaker.error
    return speaker.spoken


class _TokenTimer:
    """A counter of tokens and of the pauses between them, on the engine's thread."""

    def __init__(self, at: Callable[[int], None]) -> None:
        self.spoken = TimedAnswer([], 0.0)
        self.error: TpiError | None = None
        self.over = threading.Event()
        self._at, self._last = at, time.monotonic()

    def token(self, sampled: Sampled) -> bool:
        now = time.monotonic()
        self.spoken.pause, self._last = max(self.spoken.pause, now - self._last), now
        self.spoken.tokens.append(sampled.token)
        self._at(len(self.spoken.tokens))
        return True

    def ended(self, error: TpiError | None) -> None:
        self.error = error
        self.over.set()


@contextmanager
def during_step(seed: int, tokens: int, do: Callable[[random.Random], None]) -> Iterator[Callable[[int], None]]:
    """Call `do` in another thread, at some moment of the step after a token that `seed` draws.

    The test must call the yielded function after each of the answer's `tokens` tokens, with the number of tokens so
    far. The function delays the last tokens until `do` was called, so that the call always falls within the answer.
    """
    drawn = random.Random(seed)
    number, delay = drawn.randint(1, max(1, tokens * 3 // 4)), drawn.uniform(0, _STEP_S)
    reached, done = threading.Event(), threading.Event()

    def act() -> None:
        reached.wait()
        threading.Event().wait(delay)
        do(drawn)
        done.set()

    def heard(count: int) -> None:
        if count >= number:
            reached.set()
        if count >= tokens - 2:
            done.wait(_LONG_S)

    thread = threading.Thread(target=act)
    thread.start()
    try:
        yield heard
    finally:
        reached.set()
        thread.join()


@contextmanager
def at_random_moment(seed: int, within: float, do: Callable[[random.Random], None]) -> Iterator[None]:
    """Call `do` in another thread, at a moment within `within` seconds that `seed` draws."""
    drawn = random.Random(seed)
    delay = drawn.uniform(0, within)

    def act() -> None:
        threading.Event().wait(delay)
        do(drawn)

    thread = threading.Thread(target=act)
    thread.start()
    try:
        yield
    finally:
        thread.join()
