"""Answers to inquiries about this worker's condition.

Background threads try the ports, since a connection attempt may take seconds.
"""

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

_MOST = 4  # inquiries at once
_CONNECT_S = 2.0
_CLOSE_S = _CONNECT_S  # for all threads together; those that wait longer for a name server are left behind


class Inquiries:
    """The inquiries that are being answered. Only the I/O thread may call the methods."""

    def __init__(self, wake: Callable[[], None]) -> None:
        """Create an empty set of inquiries; a background thread calls `wake` when it has an answer."""
        self._wake = wake
        self._done: SimpleQueue[tuple[bytes, Condition]] = SimpleQueue()
        self._threads: list[Thread] = []

    def begin(self, peer: bytes, asked: Inquiry, condition: Condition, asker: str, plan: Collection[str]) -> bool:
        """Start to answer an inquiry; return False if too many inquiries are under way.

        The worker tries only ports of `asker` and of `plan`, so that it cannot be used to scan its own network.

        Args:
            peer: identity of the asker's connection, returned with the answer.
            asked: the inquiry, with the addresses to try.
            condition: the answer, without the lists of untried and unreached addresses.
            asker: IP address of the asker.
            plan: `host:port` of each node of the current plan.
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
        """Yield the answers that are ready, each after the identity of its asker's connection."""
        while not self._done.empty():  # only this thread takes from it
            yield self._done.get_nowait()

    def close(self) -> None:
        """Wait for the inquiries under way, at most `_CLOSE_S` seconds."""
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
    """Return the IP address in `host:port`, in the form of a socket's peer address; empty if `host` is a name."""
    try:
        found = ip_address(split_address(address)[0].strip("[]"))
    except (UsageError, ValueError):
        return ""
    return str(getattr(found, "ipv4_mapped", None) or found)


def _try(address: str, reached: list[str]) -> None:
    try:
        host, port = split_address(address)
        socket.create_connection((host.strip("[]"), port), _CONNECT_S).close()
    except (OSError, UsageError, UnicodeError):
        return
    reached.append(address)
