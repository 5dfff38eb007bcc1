"""What an emulated home is made of: devices, routers, links, and the path that a packet takes between two devices.

Nothing here touches the machine. Files are read by `tpi.topology.schema`; benchmarks may build a
`Topology` themselves.
"""

from collections import deque
from dataclasses import asdict, dataclass, field
from itertools import permutations
from typing import Any

from tpi.errors import UsageError

UNLIMITED = float("inf")
SUBNET = "10.77.0"
PREFIX = 24
MAX_DEVICES = 64


@dataclass(frozen=True)
class Host:
    """A machine at home. None means as much as the real one has."""

    name: str
    cpu: float | None = None  # cores
    memory: int | None = None  # bytes, page cache included
    disk: float | None = None  # bytes per second read, and as much written


@dataclass(frozen=True)
class Router:
    """A forwarding box. With `shared`, all its links take turns on one medium of that rate, as on one Wi-Fi channel."""

    name: str
    shared: float | None = None  # bits per second


@dataclass(frozen=True)
class HostLink:
    """A full-duplex cable or radio link between two devices or routers; each figure holds in each direction."""

    ends: tuple[str, str]
    bandwidth: float = UNLIMITED  # bits per second
    latency: float = 0.0  # one way, seconds
    jitter: float = 0.0  # seconds: the delay is uniform in latency +- jitter, packets stay in order
    loss: float = 0.0  # fraction of packets
    queue: float = 0.5  # seconds of traffic that the sending end buffers before it drops


@dataclass(frozen=True)
class Hop:
    """One link crossed in one direction."""

    link: HostLink
    source: str
    target: str


@dataclass(frozen=True)
class Topology:
    """Devices (the first one is the master), routers and links. Checked when constructed.

    Raises:
        UsageError: on duplicate or unknown names, more than `MAX_DEVICES` devices, or a device that is cut off.
    """

    name: str
    devices: tuple[Host, ...]
    links: tuple[HostLink, ...]
    routers: tuple[Router, ...] = ()
    about: str = ""
    _paths: dict[tuple[str, str], tuple[Hop, ...]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not 1 <= len(self.devices) <= MAX_DEVICES:
            raise UsageError(f"{self.name}: a topology has 1 to {MAX_DEVICES} devices, this one {len(self.devices)}")
        names = self.nodes
        if twice := {name for name in names if names.count(name) > 1}:
            raise UsageError(f"{self.name}: {sorted(twice)[0]!r} is defined twice; each has a name of its own")
        for link in self.links:
            if unknown := set(link.ends) - set(names):
                raise UsageError(f"{self.name}: a link ends at {sorted(unknown)[0]!r}, no device or router here")
        paths = {(a.name, b.name): self._search(a.name, b.name) for a, b in permutations(self.devices, 2)}
        object.__setattr__(self, "_paths", paths)

    @property
    def nodes(self) -> list[str]:
        """Names of all devices, then of all routers."""
        return [device.name for device in self.devices] + [router.name for router in self.routers]

    def to_dict(self) -> dict[str, Any]:
        """Plain types for JSON."""
        fields = asdict(self)
        del fields["_paths"]
        return fields

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> "Topology":
        """Inverse of `to_dict`."""
        return cls(
            fields["name"],
            tuple(Host(**device) for device in fields["devices"]),
            tuple(HostLink(**{**link, "ends": tuple(link["ends"])}) for link in fields["links"]),
            tuple(Router(**router) for router in fields["routers"]),
            fields["about"],
        )

    def address(self, device: str) -> str:
        """IPv4 address of `device`: 10.77.0.1 for the first one."""
        return f"{SUBNET}.{[d.name for d in self.devices].index(device) + 1}"

    def device(self, name: str) -> Host:
        """Raises UsageError, listing the names, if there is none called `name`."""
        for device in self.devices:
            if device.name == name:
                return device
        known = ", ".join(device.name for device in self.devices)
        raise UsageError(f"there is no device {name!r} in topology {self.name}; it has {known}")

    def path(self, source: str, target: str) -> tuple[Hop, ...]:
        """The hops between two devices: the fewest there are."""
        return self._paths[source, target]

    def latency(self, source: str, target: str) -> float:
        """One-way seconds from device to device: the sum over the hops."""
        return sum(hop.link.latency for hop in self.path(source, target))

    def jitter(self, source: str, target: str) -> float:
        """The largest deviation from `latency`, seconds."""
        return sum(hop.link.jitter for hop in self.path(source, target))

    def bandwidth(self, source: str, target: str) -> float:
        """Bits per second between two devices: the slowest hop; a shared medium divided by the times it is crossed."""
        path = self.path(source, target)
        rates = [hop.link.bandwidth for hop in path]
        for router in self.routers:
            crossings = sum(router.name in hop.link.ends for hop in path)
            if router.shared is not None and crossings:
                rates.append(router.shared / crossings)
        return min(rates, default=UNLIMITED)

    def _search(self, source: str, target: str) -> tuple[Hop, ...]:
        """Breadth first; devices do not forward."""
        forwards = {router.name for router in self.routers} | {source}
        reached: dict[str, tuple[Hop, ...]] = {source: ()}
        queue = deque([source])
        while queue and target not in reached:
            here = queue.popleft()
            for link in self.links:
                if here in forwards and here in link.ends:
                    there = link.ends[1 - link.ends.index(here)]
                    if there not in reached:
                        reached[there] = (*reached[here], Hop(link, here, there))
                        queue.append(there)
        if target not in reached:
            raise UsageError(f"{self.name}: no links lead from {source} to {target}")
        return reached[target]


def star(name: str, devices: tuple[Host, ...], link: HostLink, shared: float | None = None) -> Topology:
    """`devices` around one router called `router`, each on a link like `link` (its `ends` are ignored)."""
    links = tuple(
        HostLink((device.name, "router"), link.bandwidth, link.latency, link.jitter, link.loss, link.queue)
        for device in devices
    )
    return Topology(name, devices, links, (Router("router", shared),))
