"""The child process: it answers requests on standard input, one at a time, within limits of time and memory.

A request is JSON, preceded by its length. A timer of the process's own processor time ends the process with a signal,
which works inside C code, too. Memory is limited by the process's address space.
"""

import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from importlib import import_module
from select import select
from typing import Any

LENGTH = 8  # bytes of the length before each message, little-endian
OUT_OF_TIME = signal.SIGPROF
OUT_OF_MEMORY = 77  # an exit code
_IDLE_S = 5.0  # seconds between two checks that the parent still exists
_PAGE = resource.getpagesize()
_SENTENCE = 300  # characters of an error message

Work = Callable[[Any], Any]


def main(*arguments: str) -> None:
    """Run `_serve`; if there is not enough memory even for a reply, exit with the status OUT_OF_MEMORY."""
    try:
        _serve(*arguments)
    except MemoryError:
        os._exit(OUT_OF_MEMORY)


def _serve(module: str, opening_s: str, opening_bytes: str, seconds: str, most_bytes: str) -> None:
    """Answer requests with the function that `open_work` of `module` returns, until standard input ends.

    The first message is the argument of `open_work`. Each later one is an argument of the function that it returned.
    """
    replies = os.dup(1)
    os.dup2(2, 1)  # accidental prints must not appear as replies
    open_work = import_module(module).open_work
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    parent, work, before = os.getppid(), None, _mapped()
    _limit_memory(before + int(opening_bytes))
    while (message := _read(parent)) is not None:
        if work is None:
            reply, work = _within(float(opening_s), open_work, message)
            before = _mapped()
            _limit_memory(before + int(most_bytes))
        else:
            reply, _ = _within(float(seconds), work, message)
        grown = _mapped() - before
        _write(replies, {"grown": grown, "spent": grown > int(most_bytes) // 2} | reply)


def _within(seconds: float, work: Work, message: bytes) -> tuple[dict[str, Any], Any]:
    """Call `work(message)` with a time limit.

    Return the reply, and the result if the result is a function, else None.
    """
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        done = work(json.loads(message))
        return ({}, done) if callable(done) else ({"done": done}, None)
    except MemoryError:
        return {"memory": True, "spent": True}, None
    except Exception as error:  # noqa: BLE001 - untrusted work may raise anything
        return {"error": _sentence(error)}, None
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _sentence(error: Exception) -> str:
    """Return the error's message on one line of bounded length, without characters that could control a terminal."""
    said = " ".join(str(error).split())[:_SENTENCE] or type(error).__name__
    return "".join(character for character in said if character.isprintable())


def _mapped() -> int:
    """Return the bytes of address space in use; 0 if the system does not report it."""
    try:
        with open("/proc/self/statm", "rb") as file:  # noqa: PTH123 - pathlib is not loaded here
            return int(file.read().split()[0]) * _PAGE
    except OSError:
        return 0


def _limit_memory(most: int) -> None:
    """Limit the address space to `most` bytes. Where that is impossible (macOS), the parent watches the memory."""
    if sys.platform == "linux":
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        resource.setrlimit(resource.RLIMIT_AS, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def _read(parent: int) -> bytes | None:
    """Return the next message; None if the input has ended or the parent is gone."""
    head = _bytes(LENGTH, parent)
    return None if head is None else _bytes(int.from_bytes(head, "little"), parent)


def _bytes(count: int, parent: int) -> bytes | None:
    parts, left = list[bytes](), count
    while left:
        if not select([0], [], [], _IDLE_S)[0]:
            if os.getppid() != parent:
                return None
            continue
        part = os.read(0, min(left, 1 << 20))
        if not part:
            return None
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


def _write(target: int, reply: dict[str, Any]) -> None:
    data = json.dumps(reply).encode()
    left = memoryview(len(data).to_bytes(LENGTH, "little") + data)
    while left:
        left = left[os.write(target, left) :]
