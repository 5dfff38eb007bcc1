"""Discovery of paired workers: by their mDNS announcements, or at the address where they were paired."""

import os
import socket
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from threading import Event, Lock
from typing import TYPE_CHECKING, Any

from master.joining.checks import firewall_advice
from master.options import RunOptions, worker_addresses
from master.workers.asking import ask
from tpi.errors import NodeError, TpiError
from tpi.keys.announcement import SERVICE, Announcement, read_announcement
from tpi.keys.policy import KeyPolicy
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
_PORT = 9990  # a worker's default port
_AT_ONCE = 16  # limit of addresses that are tried at the same time
_NONE_FOUND = "no paired machine announces a worker that can be reached; name a worker with --workers HOST:PORT"


class _Listener:
    """A collector of mDNS announcements, whose methods zeroconf calls on its thread."""

    def __init__(self, wanted: Collection[bytes]) -> None:
        self.found: dict[bytes, Announcement] = {}
        self.complete = Event()
        self.over = Event()  # set when the result is no longer wanted
        self._wanted = wanted
        self._lock = Lock()

    def add_service(self, network: "Zeroconf", kind: str, name: str) -> None:
        """Record an announcement, which may be an old one from zeroconf's cache."""
        try:
            info = None if self.over.is_set() else network.get_service_info(kind, name, _ASK_MS)
        except Exception:
            if self.over.is_set():  # the error only says that the network was closed meanwhile
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
        """Do nothing, because every address is tried before use."""


def find_workers(policy: KeyPolicy, seconds: float = BROWSE_S, interfaces: Any = None) -> list[Announcement]:
    """Return the paired workers that announce themselves, sorted by name.

    With keys, addresses on this machine are left out: connections there need no key, so any process could pose as the
    owner of a public key. Takes up to `seconds`, less if all workers are found. Return at once, without sending a
    packet, if no machine is paired or there is no network. `interfaces` are the addresses of this machine to ask from
    (None: all).

    Raises:
        TpiError: if this machine is too busy to listen.
    """
    wanted = {one.key for one in policy.keys.paired}
    if not wanted:
        return []
    found = _heard(wanted, seconds, interfaces)
    if policy.locked:
        found = [replace(one, hosts=tuple(filter(policy.guards, one.hosts))) for one in found]
    return sorted((one for one in found if one.hosts), key=lambda one: one.name)


def _heard(wanted: Collection[bytes], seconds: float, interfaces: Any) -> list[Announcement]:
    """Return the announcements of the owners of `wanted` keys that arrive within `seconds`.

    Raises:
        TpiError: if this machine is too busy to listen.
    """
    from zeroconf import Error, InterfaceChoice, ServiceBrowser, Zeroconf

    listener = _Listener(wanted)
    try:
        network = Zeroconf(interfaces=interfaces or InterfaceChoice.All)
        with _left(network, listener):
            ServiceBrowser(network, SERVICE, listener=listener)  # type: ignore[arg-type]  # it has the methods that are called
            listener.complete.wait(seconds)
    except (OSError, RuntimeError):  # there is no network
        return []
    except Error as error:
        raise TpiError(
            f"cannot listen for announcements of workers ({named(error)}); name workers with --workers HOST:PORT"
        ) from None
    return list(listener.found.values())


@contextmanager
def _left(network: "Zeroconf", listener: _Listener) -> Iterator[None]:
    """Close the network after the block, and ignore errors, because received announcements stay valid."""
    try:
        yield
    finally:
        listener.over.set()
        with suppress(Exception):
            network.close()


def workers_at_home(policy: KeyPolicy, say: Callable[[str], None]) -> list[str]:
    """Return the addresses of the paired workers, reachable or not; call `say` if none is found."""
    there, hidden = _at_home(policy)
    found = [*there.values(), *hidden.values()]
    if not found and policy.keys.paired:
        say(_NONE_FOUND)
    return found


def addresses_of(named: Sequence[str], policy: KeyPolicy) -> tuple[str, ...]:
    """Return the addresses of the workers that are `named` or in TPI_WORKERS, else of the paired workers."""
    given = worker_addresses(tuple(named) or (os.environ.get("TPI_WORKERS", ""),))
    if given or not policy.locked:  # without keys no worker can be discovered
        return given
    return tuple(workers_at_home(policy, warn))


def with_found(
    asked: RunOptions, policy: KeyPolicy, say: Callable[[str], None], using: Callable[[str], None] | None = None
) -> RunOptions:
    """Return `asked` with the paired workers that can be used now, if the user named none.

    `using` is called with a sentence on the workers that are used; by default `say` is.
    """
    if not asked.discover or not asked.keys:
        return asked
    later: list[str] = []
    return replace(asked, workers=tuple(willing_at_home(policy, say, later.append, using)), busy_workers=tuple(later))


def say_without(say: Callable[[str], None], error: NodeError) -> None:
    """Call `say` with the reason, `error`, why a found worker will not be used."""
    say(f"{str(error).partition('; ')[0]}; going on without it")


def willing_at_home(
    policy: KeyPolicy,
    say: Callable[[str], None],
    later: Callable[[str], None] = lambda address: None,
    using: Callable[[str], None] | None = None,
) -> list[str]:
    """Return the addresses of the paired workers that can be used now; call `say` with the reason for every other one.

    A worker cannot be used if it refuses this machine, does not answer, serves another master, or runs another version.
    The user has named no worker, so one that cannot be used does not stop the run.

    Args:
        later: called with the address of each worker that serves another master and may be free later.
        using: called with a sentence on the workers that are used; by default `say` is.
    """
    there, hidden = _at_home(policy)
    for name, address in hidden.items():
        said = f"it announces itself at {address}, where no worker answers"
        say(f"going on without {name}: {said}; {firewall_advice(address)}")
    with closing(Net(policy=policy)) as net:
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
        (using or say)(f"using {used}; --workers none uses no other machine")
    elif policy.keys.paired:
        say("this machine computes alone" if there or hidden else f"{_NONE_FOUND}; this machine computes alone")
    return [address for _, address in willing.values()]


def _at_home(policy: KeyPolicy) -> tuple[dict[str, str], dict[str, str]]:
    """Return two dicts with the addresses of paired workers by name.

    The first has the workers that answer, the second those that are announced and do not answer.
    """
    paired = policy.keys.paired
    called = {one.key: one.name for one in paired}
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        # known addresses are tried while announcements are collected
        remembered = {one.key: pool.submit(_remembered, one, policy) for one in paired}
        announced = _announced(policy)
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


def _announced(policy: KeyPolicy) -> list[Announcement]:
    try:
        return find_workers(policy)
    except TpiError as error:  # other workers may still be where they were paired
        warn(str(error))
        return []


def _reachable(one: Announcement) -> str:
    """Return the first announced address at which a port is open, or "" if there is none."""
    for host, address in zip(one.hosts, one.addresses, strict=True):
        if _answers(host, one.port):
            return address
    return ""


def _remembered(one: PairedKey, policy: KeyPolicy) -> str:
    """Return the address at which a machine was paired, if its port is open; else "".

    Addresses at which no key is needed are not tried.
    """
    if not one.host or not policy.guards(one.host):
        return ""
    return _reachable(Announcement(one.name, one.key, _PORT, (one.host,)))


def _answers(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), _REACH_S).close()
    except OSError:
        return False
    return True
