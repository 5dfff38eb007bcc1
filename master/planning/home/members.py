"""The machines of a home and the links between them: described in words or in a file, or measured."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations

from scheduler.free import less_margin
from scheduler.model.machine import LAPTOP, DiskRate, NodeMachine
from tpi.config import parse_size
from tpi.errors import UsageError
from tpi.topology.links import LOOPBACK, Link, LinkTable
from tpi.topology.schema import load_topology
from tpi.topology.topology import UNLIMITED, Host, Topology
from tpi.topology.units import parse_rate, parse_time

DEFAULT_LINK = "300 Mbit, 1 ms"  # TPI-LLM's testbed, section 4
_MOST = 64
_SOME = re.compile(r"\s*(?:(\d+)\s*x\s*)?([^\s,]+(?: ?[KMGT]i?B)?)\s*", re.IGNORECASE)
_BITS = 8
_DETOUR = 4  # a link measured this many times as slow as the way over the master is ignored


@dataclass(frozen=True)
class Home:
    """Machines with their names, the user's own first, and the links between them.

    Attributes:
        names: the machines' names.
        machines: the machines without their accelerators, which nodes of a group use only to compute batches.
        links: the links between the machines.
        origin: a phrase that says where the figures come from.
        cards: the same machines with their accelerators; empty if there are none.
        unknown_disks: addresses of workers that have not measured their disks.
        software: the measured seconds that software adds to an allreduce, by the number of nodes in it.
    """

    names: tuple[str, ...]
    machines: tuple[NodeMachine, ...]
    links: LinkTable
    origin: str
    cards: tuple[NodeMachine, ...] = ()
    unknown_disks: tuple[str, ...] = ()
    software: Mapping[int, float] = field(default_factory=dict)

    @property
    def batching(self) -> tuple[NodeMachine, ...]:
        """The machines with their accelerators, if there are any; used to plan batches."""
        return self.cards or self.machines

    def without_bytes(self, nbytes: int) -> "Home":
        """Return the home with `nbytes` less memory on the user's own machine, where a draft model takes them."""
        machines, cards = (
            tuple(replace(each, memory=max(1, each.memory - (0 if rank else nbytes))) for rank, each in enumerate(some))
            for some in (self.machines, self.cards)
        )
        return replace(self, machines=machines, cards=cards)

    def all_like(self, machine: NodeMachine) -> "Home":
        """Return the home with every machine replaced by `machine`, except for its memory."""
        cards = tuple(replace(machine, memory=each.memory) for each in self.machines)
        hosts = tuple(replace(each, accelerator=None, more=()) for each in cards)
        return replace(self, machines=hosts, cards=cards, origin=f"{self.origin}, each as described")


def home_of_cards(machine: NodeMachine, origin: str) -> Home:
    """Return the nodes into which `--pipeline batch` divides a machine with several accelerators: one for each.

    The nodes have equal parts of the host, its memory, its bus and its disk, and are joined by the loopback interface.
    `origin` says where the figures come from.
    """
    count = len(machine.cards)
    host, disk = machine.host, machine.disk
    part = replace(
        machine,
        host=replace(host, read=host.read / count, operations=host.operations / count),
        memory=machine.memory // count,
        disk=replace(disk, read=disk.read / count),
        bus=machine.bus / count,
        more=(),
    )
    names = ("master", *(f"worker-{number}" for number in range(1, count)))
    cards = tuple(replace(part, accelerator=card) for card in machine.cards)
    hosts = (replace(part, accelerator=None),) * count
    return Home(names, hosts, LinkTable.uniform(count, LOOPBACK), f"{origin}, one node for each card", cards)


def described_home(devices: str, link: str) -> Home:
    """Return machines with the given memory, such as `8x8GiB` or `16GiB, 3x8GiB`, all joined by equal links.

    All other figures are a laptop's (`scheduler.model.machine.LAPTOP`), without an accelerator.

    Raises:
        UsageError: if `devices` or `link` cannot be parsed, or there are more than 64 machines.
    """
    sizes = [size for part in devices.split(",") for size in _some(devices, part)]
    if len(sizes) > _MOST:
        raise UsageError(f"--devices {devices}: {len(sizes)} machines are more than the {_MOST} that a home may have")
    names = ("master", *(f"device-{number}" for number in range(1, len(sizes))))
    machines = tuple(_laptop(less_margin(size)) for size in sizes)
    return Home(names, machines, LinkTable.uniform(len(sizes), _link(link)), f"laptops joined by {link}")


def home_in_file(file: str, own: NodeMachine, cores: float) -> Home:
    """Return the home of the topology `file`, a path or the name of a shipped one; the first device is the master.

    A device's cores are assumed to be as fast as those of this machine, `own`, which has `cores`. Values that the file
    leaves out are this machine's.

    Raises:
        UsageError: if the file cannot be read; the message names the line.
    """
    home = load_topology(file)
    names = tuple(device.name for device in home.devices)
    machines = tuple(_scaled(own, cores, device) for device in home.devices)
    return Home(names, machines, _links(home), f"the home of {file}, with cores as fast as this machine's")


def _some(devices: str, part: str) -> list[int]:
    match = _SOME.fullmatch(part)
    count = int(match[1] or 1) if match else 0
    if match is None or not count:
        raise UsageError(f"--devices {devices!r} is not understood; write for example 8x8GiB, or 16GiB,3x8GiB")
    size = parse_size(match[2], "--devices")
    if not size:
        raise UsageError(f"--devices {devices}: a machine needs memory; write for example 8x8GiB")
    return [size] * min(count, _MOST + 1)


def _laptop(memory: int) -> NodeMachine:
    return replace(LAPTOP, memory=memory, accelerator=None)


def _link(text: str) -> Link:
    rate, comma, latency = text.partition(",")
    if not comma:
        raise UsageError(f"--link {text!r} is not a rate and a latency; write for example {DEFAULT_LINK!r}")
    try:
        found = Link(LOOPBACK.latency_s + parse_time(latency), parse_rate(rate) / _BITS)
    except ValueError as error:
        raise UsageError(f"--link {text!r}: {error}; write for example {DEFAULT_LINK!r}") from None
    if not found.bytes_per_s:
        raise UsageError(f"--link {text!r} carries nothing; write for example {DEFAULT_LINK!r}")
    return found


def _scaled(own: NodeMachine, cores: float, device: Host) -> NodeMachine:
    share = 1.0 if device.cpu is None else min(1.0, device.cpu / cores)
    host = replace(own.host, read=own.host.read * share, operations=own.host.operations * share)
    disk = own.disk if device.disk is None else DiskRate(min(device.disk, own.disk.read))
    memory = own.memory if device.memory is None else less_margin(device.memory)
    return replace(own, host=host, disk=disk, memory=memory, accelerator=None)


def _links(home: Topology) -> LinkTable:
    names = [device.name for device in home.devices]
    found = {}
    for a, b in combinations(range(len(names)), 2):
        rate = home.bandwidth(names[a], names[b])
        bytes_per_s = LOOPBACK.bytes_per_s if rate == UNLIMITED else min(rate / _BITS, LOOPBACK.bytes_per_s)
        found[a, b] = Link(LOOPBACK.latency_s + home.latency(names[a], names[b]), bytes_per_s)
    return LinkTable(len(names), found)


def links_of_home(to_workers: Sequence[Link], between: Mapping[tuple[int, int], Link]) -> LinkTable:
    """Return the links between the master and its workers.

    Args:
        to_workers: the links from the master to each worker.
        between: measured links between workers, by indices into `to_workers`. A link that was not measured is assumed
            to have the larger latency and the smaller throughput of the two workers' links to the master. The same is
            assumed if the measured latency is far larger than that of the way over the master, because something was
            then wrong during the measurement.
    """
    size = 1 + len(to_workers)
    found = {(0, rank): link for rank, link in enumerate(to_workers, 1)}
    for a, b in combinations(range(1, size), 2):
        one, other = to_workers[a - 1], to_workers[b - 1]
        met = Link(max(one.latency_s, other.latency_s), min(one.bytes_per_s, other.bytes_per_s))
        direct = between.get((a - 1, b - 1), met)
        found[a, b] = direct if direct.latency_s <= _DETOUR * (one.latency_s + other.latency_s) else met
    return LinkTable(size, found)
