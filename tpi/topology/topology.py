"""Data model of an emulated home: devices, routers, links, and the path that a packet takes between two devices.

Nothing in this module touches the machine. `tpi.topology.schema` reads files; benchmarks may construct a `Topology`
directly.
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
    """The limits of an emulated device. None means as much as the real machine has."""

    name: str
    cpu: float | None = None  # cores
    memory: int | None = None  # bytes, page cache included
    disk: float | None = None  # bytes per second, for reading and for writing


@dataclass(frozen=True)
class Router:
    """A forwarding node.

    With `shared`, all its links take turns on one medium of that rate, as on one Wi-Fi channel.
    """

    name: str
    shared: float | None = None  # bits per second


@dataclass(frozen=True)
class HostLink:
    """A full-duplex cable or radio link between two devices or routers. Each figure applies to each direction."""

    ends: tuple[str, str]
    bandwidth: float = UNLIMITED  # bits per second
    latency: float = 0.0  # one way, seconds
    jitter: float = 0.0  # seconds; the delay is uniform in latency +- jitter, packets stay in order
    loss: float = 0.0  # fraction of packets lost
    queue: float = 0.5  # seconds of traffic that the sending end buffers before it drops packets


@dataclass(frozen=True)
class Hop:
    """One link that a packet crosses, and the direction."""

    link: HostLink
    source: str
    target: str


@dataclass(frozen=True)
class Topology:
    """Devices (the first one is the master), routers and links. Checked when constructed.

    Raises:
        UsageError: if a name is unknown or used twice, there are more than `MAX_DEVICES` devices, or two devices have
            no path between them.
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
            raise UsageError(
                f"{self.name}: {sorted(twice)[0]!r} is defined twice; give each device and router its own name"
            )
        for link in self.links:
            if unknown := set(link.ends) - set(names):
                raise UsageError(
                    f"{self.name}: a link ends at {sorted(unknown)[0]!r}, which is not one of its devices or routers"
                )
        paths = {(a.name, b.name): self._search(a.name, b.name) for a, b in permutations(self.devices, 2)}
        object.__setattr__(self, "_paths", paths)

    @property
    def nodes(self) -> list[str]:
        """Names of all devices, then of all routers."""
        return [device.name for device in self.devices] + [router.name for router in self.routers]

    def to_dict(self) -> dict[str, Any]:
        """Return the topology as plain types for JSON."""
        fields = asdict(self)
        del fields["_paths"]
        return fields

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> "Topology":
        """Return the topology that `to_dict` converted."""
        return cls(
            fields["name"],
            tuple(Host(**device) for device in fields["devices"]),
            tuple(HostLink(**{**link, "ends": tuple(link["ends"])}) for link in fields["links"]),
            tuple(Router(**router) for router in fields["routers"]),
            fields["about"],
        )

    def address(self, device: str) -> str:
        """Return the IPv4 address of `device`: 10.77.0.1 for the first one."""
        return f"{SUBNET}.{[d.name for d in self.devices].index(device) + 1}"

    def device(self, name: str) -> Host:
        """Return the device called `name`.

        Raises:
            UsageError: if the topology has no such device. The message lists the names.
        """
        for device in self.devices:
            if device.name == name:
                return device
        known = ", ".join(device.name for device in self.devices)
        raise UsageError(f"there is no device {name!r} in topology {self.name}; it has {known}")

    def path(self, source: str, target: str) -> tuple[Hop, ...]:
        """Return the hops between two devices on the path with the fewest hops."""
        return self._paths[source, target]

    def latency(self, source: str, target: str) -> float:
        """Return the one-way latency between two devices in seconds: the sum over the hops."""
        return sum(hop.link.latency for hop in self.path(source, target))

    def jitter(self, source: str, target: str) -> float:
        """Return the largest deviation from `latency` on the path, in seconds."""
        return sum(hop.link.jitter for hop in self.path(source, target))

    def bandwidth(self, source: str, target: str) -> float:
        """Return the bandwidth between two devices in bits per second: that of the slowest hop.

        A shared medium counts as a hop, with its rate divided by the number of hops that use it.
        """
        path = self.path(source, target)
        rates = [hop.link.bandwidth for hop in path]
        for router in self.routers:
            crossings = sum(router.name in hop.link.ends for hop in path)
            if router.shared is not None and crossings:
                rates.append(router.shared / crossings)
        return min(rates, default=UNLIMITED)

    def _search(self, source: str, target: str) -> tuple[Hop, ...]:
        """Return the path with the fewest hops, found by breadth-first search. Devices do not forward."""
        forwards = {router.name for router in self.routers} | {source}
        reached: dict[str, tuple[Hop, ...]] = {source: ()}
        queue = deque([source])
        while queue and target not in reached:
            node = queue.popleft()
            for link in self.links:
                if node in forwards and node in link.ends:
                    neighbour = link.ends[1 - link.ends.index(node)]
                    if neighbour not in reached:
                        reached[neighbour] = (*reached[node], Hop(link, node, neighbour))
                        queue.append(neighbour)
        if target not in reached:
            raise UsageError(f"{self.name}: there is no path from {source} to {target}; add links")
        return reached[target]


def star(name: str, devices: tuple[Host, ...], link: HostLink, shared: float | None = None) -> Topology:
    """Return a topology of `devices` around one router called `router`, with a link like `link` to each.

    The `ends` of `link` are ignored. `shared` is the rate of the router's shared medium in bits per second, if it has
    one.
    """
    links = tuple(
        HostLink((device.name, "router"), link.bandwidth, link.latency, link.jitter, link.loss, link.queue)
        for device in devices
    )
    return Topology(name, devices, links, (Router("router", shared),))
