"""Answers those who ask how this worker is. Connecting to ports takes time, so a thread of its own does it."""

import socket
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from ipaddress import ip_address
from queue import SimpleQueue
from threading import Thread

from tpi.errors import UsageError
from tpi.net.questions import Condition, Inquiry
from tpi.net.sockets import split_address

_MOST = 4  # at once
_CONNECT_S = 2.0
_CLOSE_S = _CONNECT_S  # for all of them: a name server may take long, and nobody waits for the answer


class Inquiries:
    """Those under way. All methods belong to the I/O thread."""

    def __init__(self, wake: Callable[[], None]) -> None:
        """`wake` is called by other threads when there is an answer."""
        self._wake = wake
        self._done: SimpleQueue[tuple[bytes, Condition]] = SimpleQueue()
        self._threads: list[Thread] = []

    def begin(self, peer: bytes, asked: Inquiry, condition: Condition, asker: str, plan: Collection[str]) -> bool:
        """Find out what is asked for; return False if too many inquiries are under way.

        `condition` is the answer but for what cannot be reached. Ports of `asker`, an IP address, are tried, and those
        of `plan`, `host:port` of each node: others would make the worker a scanner of its own machine and network.
        """
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        if len(self._threads) >= _MOST:
            return False
        allowed = [one for one in asked.reach if one in plan or _host(one) == asker != ""]
        untried = tuple(one for one in asked.reach if one not in allowed)
        answer = replace(condition, untried=untried)
        thread = Thread(target=self._ask, args=(peer, allowed, answer), name="inquiry", daemon=True)
        self._threads.append(thread)
        thread.start()
        return True

    def answers(self) -> Iterator[tuple[bytes, Condition]]:
        """What has been found out since the last call, and for whom."""
        while not self._done.empty():  # nobody else takes from it
            yield self._done.get_nowait()

    def close(self) -> None:
        """Wait for those under way, but not for a name server."""
        ends = time.monotonic() + _CLOSE_S
        for thread in self._threads:
            thread.join(max(0.0, ends - time.monotonic()))

    def _ask(self, peer: bytes, addresses: Sequence[str], condition: Condition) -> None:
        reached: list[str] = []
        threads = [Thread(target=_try, args=(address, reached), daemon=True) for address in addresses]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        unreached = tuple(address for address in addresses if address not in reached)
        self._done.put((peer, replace(condition, unreached=unreached)))
        self._wake()


def _host(address: str) -> str:
    """The IP address in `host:port`, as a connection's other end is written; empty for anything else."""
    try:
        found = ip_address(split_address(address)[0].strip("[]"))
    except (UsageError, ValueError):
        return ""
    return str(getattr(found, "ipv4_mapped", None) or found)


def _try(address: str, reached: list[str]) -> None:
    """Append `address` to `reached` if somebody answers there."""
    try:
        host, port = split_address(address)
        socket.create_connection((host.strip("[]"), port), _CONNECT_S).close()
    except (OSError, UsageError, UnicodeError):
        return
    reached.append(address)
