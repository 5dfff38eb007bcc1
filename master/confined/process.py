"""The parent's side: a child process that is started once and replaced after it exceeded a limit."""

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from selectors import EVENT_READ, EVENT_WRITE, DefaultSelector
from threading import Lock
from time import monotonic
from typing import Any
from weakref import finalize

from master.confined.child import LENGTH, OUT_OF_MEMORY, OUT_OF_TIME

_START_S = 60.0  # seconds for a new child to load its modules on a busy machine
_WALL = 4.0  # a child is ended when the elapsed time is this multiple of its limit of processor time
_LEAST_WALL_S = 10.0
_NO_MEMORY = (OUT_OF_MEMORY, -signal.SIGABRT, -signal.SIGKILL)  # exit codes of a process that ran out of memory
_WATCHED = sys.platform != "linux"  # macOS cannot limit a process's memory
_ONE_THREAD = {"RAYON_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
"""Environment of the child: stacks and arenas of more threads would count as memory of the work."""
_LOOK_S = 0.05  # seconds between two checks of the memory of a watched child
_RUN = (
    "import sys; sys.path[:] = sys.argv[1].split(chr(10)); from master.confined.child import main; main(*sys.argv[2:])"
)


class ConfinedError(Exception):
    """Error of a request that failed in the child or exceeded a limit. "It" in its message stands for the request."""


class NotTriedError(ConfinedError):
    """Error that says nothing about the request: the child could not be started, or the machine was too busy."""


class LimitError(ConfinedError):
    """Error of a request that took too much time or memory."""


@dataclass(frozen=True)
class Limits:
    """Limits for one request, and for opening the work: seconds of processor time, and bytes of memory."""

    seconds: float
    memory: int
    opening_seconds: float
    opening_memory: int


class ConfinedProcess:
    """One child process that does the work of one module. Safe to call from several threads; calls are serialized."""

    def __init__(self, module: str, settings: Any, limits: Limits) -> None:
        """Prepare a child process without starting it.

        `settings` is JSON, the argument of the child's `module.open_work`.
        """
        self._module, self._settings, self._limits = module, settings, limits
        self._child: _Child | None = None
        self._lock = Lock()

    def start(self) -> None:
        """Start the child in advance, so that it loads in the background. An error is ignored: `ask` reports it."""
        with self._lock, suppress(ConfinedError):
            self._started()

    def ask(self, request: Any) -> Any:
        """Send `request` to the child and return its answer, both JSON.

        Raises:
            LimitError: if the request took more time or memory than allowed; the child is replaced.
            NotTriedError: if the child cannot be started, or did not end in time because other work kept it waiting.
            ConfinedError: if the work raised an error, or the child ended.
        """
        with self._lock:
            child = self._started()
            try:
                if not child.open:
                    self._answer(child, self._settings, self._limits.opening_seconds, self._limits.opening_memory)
                    child.open = True
                return self._answer(child, request, self._limits.seconds, self._limits.memory)
            finally:
                if child.over or not child.open:
                    self._end()

    def close(self) -> None:
        """Stop the child and wait for its end; a later `ask` starts another."""
        with self._lock:
            self._end()

    def _started(self) -> "_Child":
        if self._child is None:
            try:
                self._child = _Child(self._module, self._limits)
            except OSError as error:
                raise NotTriedError(f"a process for it cannot be started: {error.strerror}") from error
        return self._child

    def _end(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.end()

    def _answer(self, child: "_Child", request: Any, seconds: float, memory: int) -> Any:
        start = 0.0 if child.open else _START_S
        reply = child.exchange(request, start + max(_WALL * seconds, _LEAST_WALL_S), memory)
        child.over = reply is None or bool(reply.get("spent"))
        if reply is None:
            raise child.why(seconds, memory)
        if "memory" in reply:
            raise _too_large(memory)
        if "error" in reply:
            raise ConfinedError(reply["error"])
        return reply.get("done")


class _Child:
    def __init__(self, module: str, limits: Limits) -> None:
        numbers = (limits.opening_seconds, limits.opening_memory, limits.seconds, limits.memory)
        self._process = subprocess.Popen(
            [sys.executable, "-c", _RUN, "\n".join(sys.path), module, *map(str, numbers)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | _ONE_THREAD,
            start_new_session=True,  # Ctrl-C at a terminal must not reach the child
        )
        assert self._process.stdin
        assert self._process.stdout
        self._in, self._out = self._process.stdin.fileno(), self._process.stdout.fileno()
        for end in (self._in, self._out):
            os.set_blocking(end, False)
        self.end = finalize(self, _end, self._process)
        self.open = self.over = False
        self._late = self._large = False

    def exchange(self, request: Any, seconds: float, memory: int) -> dict[str, Any] | None:
        """Send `request` and return the reply; None if the child ended, or exceeded `seconds` or `memory` (bytes)."""
        data = json.dumps(request).encode()
        unsent, got = memoryview(len(data).to_bytes(LENGTH, "little") + data), bytearray()
        deadline = monotonic() + seconds
        base = self._resident() if _WATCHED else 0
        with DefaultSelector() as selector:
            selector.register(self._out, EVENT_READ)
            selector.register(self._in, EVENT_WRITE)
            while len(got) < LENGTH or len(got) < LENGTH + int.from_bytes(got[:LENGTH], "little"):
                left = deadline - monotonic()
                self._late = left <= 0
                self._large = _WATCHED and self._resident() - base > memory
                if self._late or self._large:
                    return None
                for key, _ in selector.select(min(left, _LOOK_S) if _WATCHED else left):
                    if key.fd == self._in:
                        try:
                            unsent = unsent[os.write(self._in, unsent) :]
                        except BrokenPipeError:
                            return None
                        if not unsent:
                            selector.unregister(self._in)
                    elif part := os.read(self._out, 1 << 20):
                        got += part
                    else:
                        return None
        reply: dict[str, Any] = json.loads(bytes(got[LENGTH:]))
        return reply

    def why(self, seconds: float, memory: int) -> ConfinedError:
        """Stop a child that gave no reply; return the error with the reason.

        `seconds` and `memory` are the limits that were passed to `exchange`.
        """
        if not (self._late or self._large):
            self._process.wait(_START_S)
        code = self._process.poll()
        self.end()
        if code == -OUT_OF_TIME:
            return LimitError(f"it takes longer than {seconds:g} s")
        if self._late:  # the processor was busy with other work, or the child waited
            return NotTriedError("it did not end in time; the machine may be busy: try again")
        if self._large or code in _NO_MEMORY:
            return _too_large(memory)
        return ConfinedError(f"its process ended with exit code {code}")

    def _resident(self) -> int:
        """Return the child's resident memory in bytes; 0 if the child has ended."""
        import psutil

        try:
            return int(psutil.Process(self._process.pid).memory_info().rss)
        except psutil.Error:
            return 0


def _too_large(memory: int) -> LimitError:
    return LimitError(f"it takes more than {memory >> 20} MiB of memory")


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.wait()
    for end in (process.stdin, process.stdout):
        if end is not None:
            end.close()
