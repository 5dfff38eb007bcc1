"""Answers after a pause: of an idle chat, of a stopped master, and after peers are killed while the chat idles."""

import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.result import Check, Result, Row, Table
from benchmarks.support.models import smollm2
from tpi.errors import UsageError
from tpi.net.sockets import COLLECTIVE, CONTROL, WEIGHTS, Net

TPI = (sys.executable, "-m", "tpi.cli")
PEERS = 20
NOTES = """
`tpi chat` in a terminal of its own is asked for the capital of France, left idle, and asked again. The same is done
with its process stopped (SIGSTOP) in between. A third case has two standing workers: 20 peers fill the queues of the
workers' three planes and are killed. An answer is complete when the chat prompts for the next line. The pauses are real
time.
"""
_QUESTION, _PROMPT = b"What is the capital of France?", b"> "
_PATIENCE_S = 120.0  # for an answer
_FLOOD = """
import sys, time, zmq
from tpi.net.sockets import COLLECTIVE, CONTROL, WEIGHTS, Net
net, last = Net(), time.monotonic()
sockets = [net.connect(plane, "127.0.0.1", int(port), b"peer%s" % sys.argv[1].encode())
           for plane, port in zip((CONTROL, COLLECTIVE, WEIGHTS), sys.argv[2:])]
while time.monotonic() - last < 0.3:
    for socket in sockets:
        if socket.poll(0, zmq.POLLOUT):
            socket.send(bytes(1000))
            last = time.monotonic()
print("full", flush=True)
time.sleep(60)
"""


class Chat:
    """`tpi chat` at the other end of a pseudo-terminal."""

    def __init__(self, *arguments: str) -> None:
        self._terminal, inner = pty.openpty()
        command = [*TPI, "chat", "-m", str(smollm2().path), "--temp", "0", "-n", "24", *arguments]
        plain = os.environ | {"TERM": "dumb"}  # the output is read as text, so no line editor may redraw it
        self.process = subprocess.Popen(
            command, stdin=inner, stdout=inner, stderr=inner, start_new_session=True, env=plain
        )
        os.close(inner)

    def ask(self) -> float:
        """Ask a question, and return the seconds until the answer is complete; infinity if none comes."""
        begun = time.monotonic()
        os.write(self._terminal, _QUESTION + b"\n")
        return time.monotonic() - begun if self._prompted(_QUESTION) else float("inf")

    def begin(self) -> None:
        """Wait until the chat asks for the first line, and send one question."""
        self._prompted(b"")
        self.ask()

    def _prompted(self, after: bytes) -> bool:
        """Return True as soon as the chat has shown `after` and then asks for a line, or False if it does not."""
        ends, seen = time.monotonic() + _PATIENCE_S, b""
        while time.monotonic() < ends and self.process.poll() is None:
            if select.select([self._terminal], [], [], 0.5)[0]:
                seen += os.read(self._terminal, 4096)
            _, found, rest = seen.rpartition(after) if after else (b"", after, seen)
            if (found or not after) and _PROMPT in rest:
                return True
        return False

    def rest(self, seconds: float) -> None:
        """Read the output for `seconds` seconds, without input."""
        ends = time.monotonic() + seconds
        while (left := ends - time.monotonic()) > 0:
            if select.select([self._terminal], [], [], left)[0]:
                os.read(self._terminal, 4096)

    def close(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.wait()
        os.close(self._terminal)


def bench(quick: bool) -> Result:
    """Measure the answers after each kind of pause; the pauses are short if `quick`."""
    idle_s, stopped_s = (5.0, 5.0) if quick else (600.0, 300.0)
    idle, stopped = _pauses(idle_s, stopped_s)
    killed, standing = _kills()
    rows: list[Row] = [
        {"between two questions": f"{idle_s:.0f} s idle", "answer after, s": idle},
        {"between two questions": f"{stopped_s:.0f} s stopped", "answer after, s": stopped},
        {"between two questions": f"{PEERS} peers killed", "answer after, s": killed},
    ]
    checks = [
        Check("seconds to an answer after idling", idle, 10.0, at_most=True),
        Check("seconds to an answer after a stop", stopped, 10.0, at_most=True),
        Check("seconds to an answer after kills", killed, 10.0, at_most=True),
        Check("workers still running", standing, 2, within=0),
    ]
    return Result("Idle", NOTES, [Table("Answers after a pause, SmolLM2-135M, two workers", rows)], checks)


def _pauses(idle_s: float, stopped_s: float) -> tuple[float, float]:
    with ExitStack() as stack:
        chat = Chat("--local", "2")
        stack.callback(chat.close)
        chat.begin()
        chat.rest(idle_s)
        idle = chat.ask()
        chat.rest(1)
        chat.process.send_signal(signal.SIGSTOP)
        chat.rest(stopped_s)
        chat.process.send_signal(signal.SIGCONT)
        return idle, chat.ask()


def _kills() -> tuple[float, int]:
    with ExitStack() as stack:
        caches = [Path(stack.enter_context(TemporaryDirectory())) for _ in range(2)]
        workers = [stack.enter_context(_worker(cache)) for cache in caches]
        chat = Chat("--workers", ",".join(f"127.0.0.1:{port}" for _, port in workers))
        stack.callback(chat.close)
        chat.begin()
        chat.rest(1)
        for number in range(PEERS):
            _flooder(number, workers[number % 2][1])
        chat.rest(2)
        took = chat.ask()
        return took, sum(process.poll() is None for process, _ in workers)


@contextmanager
def _worker(cache: Path) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    port = _three_ports()
    command = [*TPI, "worker", "--listen", f"127.0.0.1:{port}", "--cache", str(cache), "--name", cache.name]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout
        process.stdout.readline()
        try:
            yield process, port
        finally:
            process.kill()


def _three_ports() -> int:
    """Return the first of three consecutive ports that are free."""
    for port in range(20_000, 60_000, 3):
        net = Net()
        try:
            for offset, plane in enumerate((CONTROL, COLLECTIVE, WEIGHTS)):
                net.bind(plane, "127.0.0.1", port + offset)
        except UsageError:
            continue
        finally:
            net.close()
        return port
    raise RuntimeError("no three consecutive ports are free; close other programs")


def _flooder(number: int, port: int) -> None:
    """Fill a worker's queues as far as a peer can, then kill the peer."""
    ports = [str(port + offset) for offset in range(3)]
    command = [sys.executable, "-c", _FLOOD, str(number), *ports]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout
        select.select([process.stdout], [], [], 5)
        process.kill()
