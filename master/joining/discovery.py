"""Paired workers in the network: found by what they announce (mDNS), or where they were when they were paired."""

import socket
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from threading import Event, Lock
from typing import TYPE_CHECKING, Any

from master.joining.asking import ask
from master.joining.checks import firewall_advice
from master.options import RunOptions
from tpi.errors import NodeError, TpiError
from tpi.keys.announcement import SERVICE, Announcement, read_announcement
from tpi.keys.door import Door
from tpi.keys.ring import PairedKey
from tpi.net.sockets import Net
from tpi.progress import warn
from tpi.system.threads.turns import named
from tpi.text import with_address

if TYPE_CHECKING:
    from zeroconf import Zeroconf

BROWSE_S = 2.0
_ASK_MS = 1000
_REACH_S = 1.0
_PORT = 9990  # of a worker, unless it was told another
_AT_ONCE = 16  # addresses that are tried
_NOBODY = "no paired machine announces a worker that can be reached; name one that runs with --workers HOST:PORT"


class _Listener:
    """Hears of announcements, on zeroconf's thread."""

    def __init__(self, wanted: Collection[bytes]) -> None:
        self.found: dict[bytes, Announcement] = {}
        self.complete = Event()
        self.over = Event()  # nobody listens any more
        self._wanted = wanted
        self._lock = Lock()

    def add_service(self, network: "Zeroconf", kind: str, name: str) -> None:
        """Somebody announces, or did before."""
        try:
            info = None if self.over.is_set() else network.get_service_info(kind, name, _ASK_MS)
        except Exception:
            if self.over.is_set():  # the network was closed meanwhile, which whoever asks is not told otherwise
                return
            raise
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

    Of what they announce the addresses on this machine are left out, where nobody has to prove a key: anybody can name
    somebody's public key. Takes up to `seconds`, less if all are found; no time at all, and no packet, if nobody is
    paired, or there is no network. `interfaces` are the addresses of this machine to ask from (None: all).

    Raises:
        TpiError: if this machine is too busy to listen.
    """
    wanted = {one.key for one in door.keys.paired}
    if not wanted:
        return []
    found = _heard(wanted, seconds, interfaces)
    if door.locked:
        found = [replace(one, hosts=tuple(filter(door.guards, one.hosts))) for one in found]
    return sorted((one for one in found if one.hosts), key=lambda one: one.name)


def _heard(wanted: Collection[bytes], seconds: float, interfaces: Any) -> list[Announcement]:
    """What the owners of `wanted` keys announce within so many seconds. Errors as `find_workers`."""
    from zeroconf import Error, InterfaceChoice, ServiceBrowser, Zeroconf

    listener = _Listener(wanted)
    try:
        network = Zeroconf(interfaces=interfaces or InterfaceChoice.All)
        with _left(network, listener):
            ServiceBrowser(network, SERVICE, listener=listener)  # type: ignore[arg-type]  # it has what is called
            listener.complete.wait(seconds)
    except (OSError, RuntimeError):  # there is no network to ask in
        return []
    except Error as error:
        raise TpiError(
            f"machines that announce themselves cannot be heard ({named(error)}); name workers with --workers HOST:PORT"
        ) from None
    return list(listener.found.values())


@contextmanager
def _left(network: "Zeroconf", listener: _Listener) -> Iterator[None]:
    """Closed after the block, as well as a busy machine can: what was heard is heard."""
    try:
        yield
    finally:
        listener.over.set()
        with suppress(Exception):
            network.close()


def workers_at_home(door: Door, say: Callable[[str], None]) -> list[str]:
    """Addresses of the paired workers, also those announced that cannot be reached; `say` hears it if there is none."""
    there, hidden = _at_home(door)
    found = [*there.values(), *hidden.values()]
    if not found and door.keys.paired:
        say(_NOBODY)
    return found


def with_found(
    asked: RunOptions, door: Door, say: Callable[[str], None], using: Callable[[str], None] | None = None
) -> RunOptions:
    """Return what was asked for, with the paired workers that can be used now if no others were named.

    `using` hears which they are, in place of `say`.
    """
    if not asked.discover or not asked.keys:
        return asked
    later: list[str] = []
    return replace(asked, workers=tuple(willing_at_home(door, say, later.append, using)), later=tuple(later))


def say_without(say: Callable[[str], None], error: NodeError) -> None:
    """Say that a worker which was found is done without, and why."""
    say(f"{str(error).partition('; ')[0]}; going on without it")


def willing_at_home(
    door: Door,
    say: Callable[[str], None],
    later: Callable[[str], None] = lambda address: None,
    using: Callable[[str], None] | None = None,
) -> list[str]:
    """As `workers_at_home`, less those who cannot be used now: `say` hears who that is and why.

    `using` hears who is used, in place of `say`.

    Who does not let this machine in, does not answer, serves another master or is of another version. The user has
    named nobody, so one machine that cannot be used keeps this one from none of the others. `later` hears of the
    addresses of those who serve another master: they may be free later.
    """
    there, hidden = _at_home(door)
    for name, address in hidden.items():
        said = f"it announces itself at {address}, where nobody answers"
        say(f"going on without {name}: {said}; {firewall_advice(address)}")
    with closing(Net(door=door)) as net:
        asked = ask(net, list(there.values()))
    called = {address: name for name, address in there.items()}
    willing: dict[bytes | str, tuple[str, str]] = {}  # a machine that is found under two addresses is used once
    busy: dict[bytes | str, str] = {}
    for one in asked:
        if one.unwilling:
            say(f"going on without {called[one.address]}: {one.unwilling}")
            if one.in_use:
                busy.setdefault(one.key or one.address, one.address)
        else:
            willing.setdefault(one.key or one.address, (one.name, one.address))
    for address in busy.values():
        later(address)
    if willing:
        used = ", ".join(with_address(name, address) for name, address in willing.values())
        (using or say)(f"using {used}; --workers none uses nobody")
    elif door.keys.paired:
        say("this machine computes alone" if there or hidden else f"{_NOBODY}; this machine computes alone")
    return [address for _, address in willing.values()]


def _at_home(door: Door) -> tuple[dict[str, str], dict[str, str]]:
    """Addresses of the paired workers, by what they are called here: those that can be reached, and those announced
    that cannot."""
    paired = door.keys.paired
    called = {one.key: one.name for one in paired}
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        remembered = {one.key: pool.submit(_remembered, one, door) for one in paired}  # while others are listened for
        announced = _announced(door)
        there_now = list(pool.map(_reachable, announced))
        paired_at = {key: address.result() for key, address in remembered.items()}
        found = [
            (one, address or paired_at.get(one.key, "")) for one, address in zip(announced, there_now, strict=True)
        ]
        silent = [one for one in paired if one.key not in {other.key for other in announced}]
        there = {address: called.get(one.key, one.name) for one, address in found}
        there |= {address: one.name for one in silent if (address := paired_at[one.key]) not in there}
    hidden = {called.get(one.key, one.name): one.addresses[0] for one, address in found if not address}
    return {name: address for address, name in there.items() if address}, hidden


def _announced(door: Door) -> list[Announcement]:
    try:
        return find_workers(door)
    except TpiError as error:  # others may still be where they were paired
        warn(str(error))
        return []


def _reachable(one: Announcement) -> str:
    """The first of its addresses at which somebody answers, or nothing."""
    for host, address in zip(one.hosts, one.addresses, strict=True):
        if _answers(host, one.port):
            return address
    return ""


def _remembered(one: PairedKey, door: Door) -> str:
    """Where a machine was when it was paired, if somebody answers there who has to prove a key; or nothing."""
    if not one.host or not door.guards(one.host):
        return ""
    return _reachable(Announcement(one.name, one.key, _PORT, (one.host,)))


def _answers(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), _REACH_S).close()
    except OSError:
        return False
    return True
