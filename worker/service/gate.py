"""Keeps connections of strangers from using up the process's file descriptors and memory.

Where keys are asked for, few connections may be open at once: one that has not proved its key yet can have as much
memory as a frame may take. And at the limit of descriptors libzmq's I/O thread would try to accept, in vain, as fast as
it can. So shortly before either this process accepts nobody new until those who say nothing have been sent away
(libzmq does that after five seconds).
"""

import os
import resource
import socket
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from stat import S_ISSOCK

from tpi.net.monitor import Arrivals
from tpi.system.packets import accept_packets, drop_packets

_QUEUED = 3 * 16  # connections that the three planes may have in their backlogs (zmq.BACKLOG)
_OWN = 64  # descriptors that the process needs itself
_MOST_CONNECTIONS = 16  # where keys are asked for, beside those of the nodes that are expected: 256 KiB each at worst
_DESCRIPTORS = Path("/proc/self/fd")


class Gate:
    """In front of all ports of this process. Does nothing where the system is not Linux."""

    def __init__(self, ports: Iterable[int], arrivals: Sequence[Arrivals] = ()) -> None:
        """The ports must be listening; `arrivals` are of those that ask for keys."""
        self.shut = False
        self.expected = 0  # connections of nodes
        self.arrivals = arrivals
        self._soft, self._hard = _limits()
        self._most = max(self._soft - _QUEUED - _OWN, self._soft // 2)
        self._listeners = _listeners(set(ports)) if _DESCRIPTORS.is_dir() else []

    def watch(self) -> None:
        """Shut or open the gate. To be called several times a second."""
        used = _used() if self._listeners else 0
        connections = max(0, sum(one.count() for one in self.arrivals) - self.expected)
        if not self.shut and (used > self._most or connections > _MOST_CONNECTIONS):
            self._turn(shut=True)
        elif self.shut and used < self._most // 2 and connections < _MOST_CONNECTIONS // 2:
            self._turn(shut=False)

    def crowd(self) -> None:
        """Shut the gate if too many come. To be called whenever one of `arrivals` tells of somebody."""
        if sum(one.count() for one in self.arrivals) - self.expected > _MOST_CONNECTIONS and not self.shut:
            self._turn(shut=True)

    def close(self) -> None:
        """Open it for good."""
        if self.shut:
            self._turn(shut=False)
        for listener in self._listeners:
            listener.close()
        self._listeners = []
        for one in self.arrivals:
            one.close()
        self.arrivals = ()

    def _turn(self, shut: bool) -> None:
        self.shut = shut
        for listener in self._listeners:
            (drop_packets if shut else accept_packets)(listener)
        # who is in the backlogs comes in meanwhile: nothing else ends the I/O thread's attempts
        room = min(self._hard, self._soft + _QUEUED) if shut else self._soft
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (room, self._hard))


def _limits() -> tuple[int, int]:
    """Soft and hard limit; where they are the same the soft one is lowered by what a shut gate lets in."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = 1 << 20
    soft, hard = (most if limit == resource.RLIM_INFINITY else min(limit, most) for limit in (soft, hard))
    if hard - soft < _QUEUED and soft >= 2 * (_QUEUED + _OWN):
        soft -= _QUEUED
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return soft, hard


def _used() -> int:
    try:
        return sum(1 for _ in _DESCRIPTORS.iterdir())
    except OSError:  # none is left to read the directory with
        return 1 << 30


def _listeners(ports: set[int]) -> list[socket.socket]:
    """This process's listening TCP sockets on `ports`, by descriptors of their own."""
    found = []
    for number in [int(path.name) for path in _DESCRIPTORS.iterdir()]:
        with suppress(OSError):  # the one that the directory was read with
            if S_ISSOCK(os.fstat(number).st_mode) and _listens(number, ports):
                found.append(socket.socket(fileno=os.dup(number)))
    return found


def _listens(number: int, ports: set[int]) -> bool:
    candidate = socket.socket(fileno=number)
    try:
        internet = candidate.family in (socket.AF_INET, socket.AF_INET6)
        listens = internet and candidate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        return bool(listens) and candidate.getsockname()[1] in ports
    finally:
        candidate.detach()  # it is libzmq's
