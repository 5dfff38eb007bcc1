"""A process that has imported TPI, and forks programs that then import little.

`python -m tests.support.processes.forker FD` serves the requests that arrive at the Unix socket FD until its other end
is closed (`tests.support.forking` sends them). It has one thread, so that a fork is safe. A forked process takes over
the descriptors 0 to 2, the limits, the directory and the environment that the request names. Its parent ends at once,
so it becomes a child of the process that sent the request. If its program may start others, it gets a forker too.
"""

import atexit
import gc
import json
import os
import resource
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from tests.support import forking

_MODULES = (
    "tpi.cli", "master.commands", "master.session", "master.deployment.deploy", "master.workers.local",
    "master.api.command", "master.api.app", "master.api.server", "master.batch.command", "master.chat.command",
    "master.planning.command", "master.joining.commands", "master.confined.child", "master.text.templates.renderer",
    "master.generation.thread", "tpi.pack.builder.build", "worker.commands", "worker.equipment",
    "worker.service.daemon", "worker.node.build", "worker.cachecommands",
)  # fmt: skip
_FIRST = 1 << 16  # bytes, more than what is sent with the descriptors


def main() -> None:
    """Import modules, serve requests, and in each forked process run its program."""
    for name in _MODULES:
        import_module(name)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # on Ctrl-C, this process ends with the one that sends requests
    gc.collect()
    gc.freeze()  # a collection in a forked process would copy the memory of all objects that it visits
    requests = socket.socket(fileno=int(sys.argv[1]))
    while (request := _forked(requests)) is not None:
        if request["session"]:
            os.setsid()
        if forking.starts_programs(request["command"]):
            mine, theirs = socket.socketpair()
            if os.fork() == 0:  # this is the program's own forker
                _inherit([os.open(os.devnull, os.O_RDWR)] * 3, keep=theirs.fileno())
                requests = theirs
                continue
            theirs.close()
            forking.install(forking.Forker(mine))
        _become(request)
        forking.run(request["command"])
        break


def _forked(requests: socket.socket) -> dict[str, Any] | None:
    """Fork a process for each request. Return its request in the forked process, None after the last request."""
    while True:
        first, descriptors, _, _ = socket.recv_fds(requests, _FIRST, 3)
        if not first:
            return None
        size, data = int.from_bytes(first[:8], "little"), bytearray(first[8:])
        while len(data) < size:
            data += requests.recv(size - len(data))
        begin, held = os.pipe()
        answer, reply = os.pipe()
        middle = os.fork()
        if middle == 0:
            child = os.fork()
            if child:
                os.write(reply, child.to_bytes(8, "little"))
                os._exit(0)
            os.close(held)
            os.read(begin, 1)  # returns when the process that sent the request is the parent
            requests.detach()  # else its end would close a descriptor of the program that has the same number
            _inherit(descriptors)
            return dict(json.loads(data))
        os.waitpid(middle, 0)
        requests.sendall(os.read(answer, 8))
        for each in (begin, held, answer, reply, *descriptors):
            os.close(each)


def _inherit(descriptors: Sequence[int], keep: int = 2) -> None:
    """Make `descriptors` the standard input, output and error, and close all others but `keep`."""
    high = [os.dup(each) for each in descriptors]  # not one of the three targets
    for target, each in enumerate(high):
        os.dup2(each, target)
    for each in {int(entry.name) for entry in Path("/proc/self/fd").iterdir()} - {0, 1, 2, keep}:
        with suppress(OSError):  # the descriptor that read the folder is closed
            os.close(each)


def _become(request: Mapping[str, Any]) -> None:
    """Take over what a process inherits from the one that starts it, and open the standard streams."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    atexit.register(gc.unfreeze)  # at the end, all objects are collected
    for limit, value in request["limits"]:
        if resource.getrlimit(limit) != tuple(value):
            resource.setrlimit(limit, tuple(value))
    os.sched_setaffinity(0, request["cores"])
    os.umask(request["umask"])
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    at_once = forking.is_unbuffered(request["command"])
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        before: Any = getattr(sys, name)
        raw = open(number, "wb" if number else "rb", 0 if at_once and number else -1, closefd=False)  # noqa: SIM115
        lines = number == 2 or (number == 1 and os.isatty(1))
        stream = TextIOWrapper(raw, before.encoding, before.errors, line_buffering=lines, write_through=at_once)
        stream.mode = raw.mode[0]  # type: ignore[misc]
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


if __name__ == "__main__":
    main()
