"""A limit on connections, so that strangers cannot use up the process's file descriptors or memory.

A connection that has not yet proved its key can take as much memory as one frame, so only a few such connections may be
open at once. If the process had no free descriptors, libzmq's I/O thread would retry `accept` in a busy loop. Shortly
before either limit, this process stops accepting connections, until libzmq has closed the idle ones (after 5 seconds).
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
_MOST_CONNECTIONS = 16  # on ports that require keys, in addition to the expected nodes; at most 256 KiB each
_DESCRIPTORS = Path("/proc/self/fd")


class ConnectionLimit:
    """The limit on connections to all ports of this process. On systems other than Linux it has no effect."""

    def __init__(self, ports: Iterable[int], arrivals: Sequence[Arrivals] = ()) -> None:
        """Guard `ports`, which must be listening; `arrivals` count the connections to ports that require keys."""
        self.shut = False
        self.expected = 0  # number of connections that nodes of the plan need
        self.arrivals = arrivals
        self._soft, self._hard = _limits()
        self._most = max(self._soft - _QUEUED - _OWN, self._soft // 2)
        self._listeners = _listeners(set(ports)) if _DESCRIPTORS.is_dir() else []

    def update(self) -> None:
        """Stop accepting connections if the process has too many descriptors or connections; start again if it has few.

        Call this several times a second.
        """
        used = _used() if self._listeners else 0
        connections = max(0, sum(one.count() for one in self.arrivals) - self.expected)
        if not self.shut and (used > self._most or connections > _MOST_CONNECTIONS):
            self._turn(shut=True)
        elif self.shut and used < self._most // 2 and connections < _MOST_CONNECTIONS // 2:
            self._turn(shut=False)

    def shut_if_crowded(self) -> None:
        """Stop accepting connections if too many are open on ports that require keys.

        Call this whenever one of `arrivals` has an event, which is sooner than the next `update`.
        """
        if sum(one.count() for one in self.arrivals) - self.expected > _MOST_CONNECTIONS and not self.shut:
            self._turn(shut=True)

    def close(self) -> None:
        """Accept connections again, and stop limiting them."""
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
        # leave descriptors for the connections in the backlogs, or the I/O thread would retry `accept` without end
        room = min(self._hard, self._soft + _QUEUED) if shut else self._soft
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (room, self._hard))


def _limits() -> tuple[int, int]:
    """Return the soft and the hard limit on the number of the process's descriptors.

    If they are equal, lower the soft limit first. It is raised again while no connections are accepted.
    """
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
    except OSError:  # no descriptor is left to read the directory
        return 1 << 30


def _listeners(ports: set[int]) -> list[socket.socket]:
    """Return this process's listening TCP sockets on `ports`, with duplicated descriptors."""
    found = []
    for number in [int(path.name) for path in _DESCRIPTORS.iterdir()]:
        with suppress(OSError):  # the descriptor that the directory was read with is closed now
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
        candidate.detach()  # libzmq owns the descriptor
