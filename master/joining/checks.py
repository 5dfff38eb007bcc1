"""The checks of `tpi doctor`: this machine, and each worker from both sides. Nothing in this module prints."""

import errno
import os
import shutil
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from master.workers.asking import WorkerInquiry, ask
from master.workers.survey import WorkerLinks
from scheduler.free import default_budget
from tpi import __version__
from tpi.errors import UsageError
from tpi.keys.policy import KeyPolicy
from tpi.keys.ring import KeyRing
from tpi.keys.text import short_key
from tpi.net.questions import Condition
from tpi.net.sockets import Net, split_address

_LEAST_DISK = 4 << 30  # bytes of disk, enough for a small model's pack and shards
_LEAST_MEMORY = 512 << 20
_CONNECT_S = 2.0
_CLOCK_S = 300.0  # seconds; a larger difference of clocks is reported, which other programs need and tpi does not
GiB = 1 << 30


@dataclass(frozen=True)
class Observation:
    """The result of one check. `advice` is the way to fix a problem; empty if there is none."""

    subject: str
    found: str
    advice: str = ""


def check_machine(policy: KeyPolicy, cache: Path, port: int) -> Iterator[Observation]:
    """Check this machine's keys, disk and memory, and if `port` and the next two ports are free for a worker."""
    yield _own_key(policy)
    cache = next(one for one in (cache, *cache.parents) if one.exists())
    free, memory = shutil.disk_usage(cache).free, default_budget()
    less = "free some space, or set TPI_CACHE, or --cache, to a directory on another disk"
    yield Observation("disk", f"{free / GiB:.1f} GiB free for {cache}", less if free < _LEAST_DISK else "")
    if not os.access(cache, os.W_OK):
        yield Observation(
            "disk", f"{cache} cannot be written", "set TPI_CACHE, or --cache, to a directory that can be written"
        )
    close = "end programs that use much memory; weights that do not fit are read from disk for each token"
    yield Observation("memory", f"{memory / GiB:.1f} GiB to use", close if memory < _LEAST_MEMORY else "")
    for number in range(port, port + 3):
        if _taken(number):
            yield Observation("ports", f"{number} is in use; if not by a worker, give another port with --listen")


def check_workers(net: Net, addresses: Sequence[str], links: WorkerLinks) -> Iterator[tuple[str, list[Observation]]]:
    """Check each worker; yield its address and results: its answer, its ports, and other workers' ports from it.

    `links` has the known links between workers, which are added to the results.
    """
    first = {one.address: one for one in ask(net, addresses)}
    ports = {address: _sum_port(address, one.condition) for address, one in first.items() if one.condition}
    reach = {address: tuple(port for other, port in ports.items() if other != address) for address in ports}
    second = {one.address: one for one in ask(net, [address for address in ports if reach[address]], reach)}
    for address, one in first.items():
        if one.condition is None:
            found, _, advice = one.problem.partition("; ")
            if not one.answered:
                advice = f"{advice or 'look at that machine'}; {firewall_advice(address)}"
            yield address, [Observation("answer", found, advice or "look at that machine")]
        else:
            unreached = second[address].condition if address in second else None
            others = [other for other in first.values() if other.condition and other is not one]
            yield address, [*_worker(one, one.condition), *_from_there(unreached, ports), *_links(one, others, links)]


def firewall_advice(address: str) -> str:
    """Return advice for the case that a worker runs at `address` and does not answer."""
    port = split_address(address)[1]
    return f"its firewall has to let ports {port} to {min(port + 2, 65535)} through"


def _own_key(policy: KeyPolicy) -> Observation:
    try:
        mine, paired = (
            policy.identity,
            KeyRing(policy.folder).read().paired,
        )  # `KeyPolicy` does not report unreadable keys
    except UsageError as error:
        return Observation("key", str(error), "follow this message")
    others = ", ".join(one.name for one in paired) or "no machine yet (run tpi pair there, then on this machine)"
    return Observation("key", f"{short_key(mine.public)}, paired with {others}")


def _worker(one: WorkerInquiry, said: Condition) -> Iterator[Observation]:
    use = f"used by {said.used_by} for {said.used_s:.0f} s" if said.used_by else "free"
    yield Observation("answer", f"{one.name} after {one.round_trip * 1e3:.0f} ms, {use}")
    yield Observation("version", f"{said.version}, and {__version__} on this machine: they speak the same protocol")
    host = split_address(one.address)[0]
    for plane, port in (("sums", said.collective_port), ("weights", said.weights_port)):
        open_ = _reachable(host, port)
        advice = "" if open_ else f"let port {port} through that machine's firewall"
        yield Observation(plane, f"port {port} {'can' if open_ else 'cannot'} be reached from this machine", advice)
    apart = abs(said.clock - time.time())
    late = "; tpi does not need exact clocks, but other programs do: set them" if apart > _CLOCK_S else ""
    yield Observation("clock", f"{apart:.0f} s apart{late}")
    profile = said.profile
    memory, disk = profile.memory_limit or profile.memory_free, profile.disk_free
    less = "too little; free some on that machine" if memory < _LEAST_MEMORY else ""
    yield Observation("memory", f"{memory / GiB:.1f} GiB to use", less)
    yield Observation(
        "disk", f"{disk / GiB:.1f} GiB free", "free some space on that machine" if disk < _LEAST_DISK else ""
    )
    yield Observation("devices", f"{profile.cores} cores{', ' + profile.card.name if profile.card else ''}")


def _from_there(said: Condition | None, ports: dict[str, str]) -> Iterator[Observation]:
    """Yield an observation for each port of another worker that this worker did not reach or could not try.

    `said` is this worker's answer. `ports` are the ports that it was asked to try, by the address of the other worker.
    """
    names = {port: address for address, port in ports.items()}
    for port in said.unreached if said else ():
        where = f"{port} (of {names.get(port, port)}) cannot be reached from that machine"
        yield Observation(
            "sums",
            where,
            "open it in the firewalls, or use --collective star, in which workers do not connect to each other",
        )
    for port in said.untried if said else ():
        yield Observation(
            "sums", f"{port} (of {names.get(port, port)}) can be tried from that machine only while both serve a run"
        )


def _links(one: WorkerInquiry, others: Sequence[WorkerInquiry], links: WorkerLinks) -> Iterator[Observation]:
    known = links.between([one.end, *(other.end for other in others)])
    for (a, b), link in known.items():
        if a == 0:
            yield Observation("link", f"{link.words()} to {others[b - 1].name}, as last measured")


def _sum_port(address: str, said: Condition) -> str:
    return f"{split_address(address)[0]}:{said.collective_port}"


def _reachable(host: str, port: int) -> bool:
    try:
        socket.create_connection((host.strip("[]"), port), _CONNECT_S).close()
    except OSError:
        return False
    return True


def _taken(port: int) -> bool:
    return any(_in_use(family, port) for family in (socket.AF_INET, socket.AF_INET6))


def _in_use(family: socket.AddressFamily, port: int) -> bool:
    try:
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            probe.bind(("", port))
    except OSError as error:  # other errors, such as no right to a low port or no IPv6, do not mean that it is in use
        return error.errno == errno.EADDRINUSE
    return False
