"""Paired workers in the network, found by what they announce (mDNS)."""

import socket
from collections.abc import Callable, Collection, Mapping
from contextlib import closing
from threading import Event, Lock
from typing import TYPE_CHECKING, Any

from master.joining.asking import ask
from tpi.keys.announcement import SERVICE, Announcement, read_announcement
from tpi.keys.door import Door
from tpi.net.sockets import Net

if TYPE_CHECKING:
    from zeroconf import Zeroconf

BROWSE_S = 2.0
_ASK_MS = 1000
_REACH_S = 1.0


class _Listener:
    """Hears of announcements, on zeroconf's thread."""

    def __init__(self, wanted: Collection[bytes]) -> None:
        self.found: dict[bytes, Announcement] = {}
        self.complete = Event()
        self._wanted = wanted
        self._lock = Lock()

    def add_service(self, network: "Zeroconf", kind: str, name: str) -> None:
        """Somebody announces, or did before."""
        info = network.get_service_info(kind, name, _ASK_MS)
        if info is None or info.port is None:
            return
        said = read_announcement(dict(info.properties), info.port, info.parsed_scoped_addresses())
        if said is not None and said.key in self._wanted:
            with self._lock:
                self.found[said.key] = said
                if len(self.found) == len(self._wanted):
                    self.complete.set()

    update_service = add_service

    def remove_service(self, network: "Zeroconf", kind: str, name: str) -> None:
        """Somebody has left; whether it can be reached is found out anyway."""


def find_workers(door: Door, seconds: float = BROWSE_S, interfaces: Any = None) -> list[Announcement]:
    """The paired workers that announce themselves, in the order of their names.

    Takes up to `seconds`, less if all are found; no time at all, and no packet, if nobody is paired. `interfaces` are
    the addresses of this machine to ask from (None: all).
    """
    wanted = {one.key for one in door.keys.paired}
    if not wanted:
        return []
    from zeroconf import InterfaceChoice, ServiceBrowser, Zeroconf

    listener = _Listener(wanted)
    network = Zeroconf(interfaces=interfaces or InterfaceChoice.All)
    try:
        ServiceBrowser(network, SERVICE, listener=listener)  # type: ignore[arg-type]  # it has what is called
        listener.complete.wait(seconds)
    finally:
        network.close()
    return sorted(listener.found.values(), key=lambda one: one.name)


def workers_at_home(door: Door, say: Callable[[str], None]) -> list[str]:
    """Addresses of the paired workers that can be reached; `say` hears which are used, or that none is."""
    there = _at_home(door)
    _say_used(there, door, say)
    return list(there.values())


def willing_at_home(door: Door, say: Callable[[str], None]) -> list[str]:
    """As `workers_at_home`, less those who do not let this machine in or do not answer; `say` hears why.

    The user has named nobody, so one machine that has revoked this one's key keeps it from none of the others.
    """
    there = _at_home(door)
    with closing(Net(door=door)) as net:
        problems = {one.address: one.problem for one in ask(net, list(there.values())) if one.problem}
    for name, address in there.items():
        if address in problems:
            say(f"going on without {name}: {problems[address]}")
    willing = {name: address for name, address in there.items() if address not in problems}
    _say_used(willing, door, say)
    return list(willing.values())


def _at_home(door: Door) -> dict[str, str]:
    """Addresses of the paired workers that can be reached, by what they are called here."""
    paired = {one.key: one.name for one in door.keys.paired}
    found = {paired.get(one.key, one.name): _reachable(one) for one in find_workers(door)}
    return {name: address for name, address in found.items() if address}


def _say_used(there: Mapping[str, str], door: Door, say: Callable[[str], None]) -> None:
    if there:
        say(f"using {', '.join(f'{name} ({address})' for name, address in there.items())}; --workers none uses nobody")
    elif door.keys.paired:
        say(
            "no paired machine announces a worker that can be used: this machine computes alone; "
            "name one that runs with --workers HOST:PORT"
        )


def _reachable(one: Announcement) -> str:
    """The first of its addresses at which somebody answers, or nothing."""
    for host, address in zip(one.hosts, one.addresses, strict=True):
        if _answers(host, one.port):
            return address
    return ""


def _answers(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), _REACH_S).close()
    except OSError:
        return False
    return True
