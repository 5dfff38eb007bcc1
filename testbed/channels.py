"""The arithmetic of the user-space link: when does a packet that leaves one device now arrive at another?

Each direction of each link, and each shared medium, is a `Channel`. A packet is treated as a fluid: it flows on as it
comes, like the train of small packets that it would be on a real wire, so a 64 KiB packet over four equal links is
serialised once and not four times. What arrives at a channel while an earlier packet is being sent waits its turn.

Packets must enter a channel in the order in which they reach it, not in which they left their devices. So a packet's
next hop is computed at its *commit time*: when nothing that leaves a device from now on can reach that channel before
it. On paths of equal latency that is at once. Where it is later, nobody is woken for it: it is done together with
whatever is due next, and at the latest when the packet could arrive. So a packet costs about one timer however many
hops it has.

No clock, no sockets: times are seconds, passed in.
"""

from dataclasses import dataclass
from heapq import heappop, heappush
from random import Random

from testbed.topology import UNLIMITED, Topology

_SAME = 1e-9  # seconds; sums of latencies differ in their last bits
# commit time, number, hop, times of the first and last bit at that hop, route, packet
Event = tuple[float, int, int, float, float, "Route", bytes]


class Channel:
    """One direction of a link, or a shared medium. `free` is when all bits accepted so far will be sent."""

    __slots__ = (
        *("cut", "dropped", "first", "free", "jitter", "last"),
        *("latency", "lookahead", "loss", "queue", "seconds_per_byte"),
    )

    def __init__(self, bits: float, latency: float = 0.0, jitter: float = 0.0, loss: float = 0.0, queue: float = 0.5):
        self.latency, self.jitter, self.loss, self.queue = latency, jitter, loss, queue
        self.seconds_per_byte = 8 / bits
        self.lookahead = UNLIMITED  # the least seconds that any packet takes from its device to here
        self.free = self.first = self.last = 0.0
        self.cut = False
        self.dropped = 0

    def cross(self, first: float, last: float, size: int, random: Random) -> tuple[float, float] | None:
        """When the first and last bit come out, for a packet whose bits reach the channel from `first` to `last`.

        Args:
            size: bytes of the packet.

        Returns:
            None if the packet is dropped: the channel is cut, its queue is full, or the packet is lost.
        """
        start = self.free if self.free > first else first
        if self.cut or start - first > self.queue or (self.loss and random.random() < self.loss):
            self.dropped += 1
            return None
        self.free = start + size * self.seconds_per_byte
        delay = self.latency
        if self.jitter:
            delay += random.uniform(-self.jitter, self.jitter)
        self.first = max(self.first, start + delay)
        self.last = max(self.last, max(self.free, last) + delay)
        return self.first, self.last


@dataclass(frozen=True, eq=False)
class Route:
    """The channels from one device to another, and the index of the device at its end."""

    target: int
    channels: tuple[Channel, ...]
    remaining: tuple[float, ...]  # the least seconds from the start of each channel to the device, and a last 0


def _route(target: int, channels: list[Channel]) -> Route:
    remaining = [0.0]
    for channel in reversed(channels):
        remaining.insert(0, remaining[0] + channel.latency - channel.jitter)
    return Route(target, tuple(channels), tuple(remaining))


class Emulator:
    """All packets under way in one emulated home. Devices are numbered as in the topology."""

    def __init__(self, topology: Topology, seed: int = 0) -> None:
        self._random = Random(seed)
        self._events: list[Event] = []
        self._wakes: list[float] = []  # when each event could lead to an arrival
        self._number = 0
        self.channels = {
            (link.ends[a], link.ends[1 - a]): Channel(link.bandwidth, link.latency, link.jitter, link.loss, link.queue)
            for link in topology.links
            for a in (0, 1)
        }
        media = {router.name: Channel(router.shared) for router in topology.routers if router.shared is not None}
        names = [device.name for device in topology.devices]
        self.routes = {
            (i, j): _route(j, self._along(topology, a, b, media))
            for i, a in enumerate(names)
            for j, b in enumerate(names)
            if i != j
        }
        self._look_ahead()

    def send(self, now: float, source: int, target: int, packet: bytes) -> None:
        """`packet` leaves device `source` for `target` at `now`. Call `due(now)` first."""
        route = self.routes[source, target]
        self._number += 1
        self._advance((now, self._number, 0, now, now, route, packet), now)

    def due(self, now: float, slack: float = 0.0) -> list[tuple[float, int, bytes]]:
        """Packets that arrive by `now` (or `slack` seconds later), in order: time due, device, packet."""
        events, wakes, horizon = self._events, self._wakes, now + slack
        arrived = []
        while events and events[0][0] <= horizon:
            event = heappop(events)
            if event[2] == len(event[5].channels):
                arrived.append((event[0], event[5].target, event[6]))
            else:
                self._advance(event, horizon)
        while wakes and wakes[0] <= horizon:
            heappop(wakes)
        return arrived

    def next_event(self) -> float:
        """When `due` has to be called next; infinity if nothing is under way."""
        return self._wakes[0] if self._wakes else UNLIMITED

    def next_commit(self) -> float:
        """The earliest commit time of all packets under way; infinity if there are none."""
        return self._events[0][0] if self._events else UNLIMITED

    @property
    def dropped(self) -> int:
        """Packets dropped by cut links, full queues and loss so far."""
        channels = {id(c): c for route in self.routes.values() for c in route.channels}
        return sum(channel.dropped for channel in channels.values())

    def _advance(self, event: Event, now: float) -> None:
        """Take a packet over as many hops as come before all others' next ones, and keep it for the rest."""
        _, number, hop, first, last, route, packet = event
        channels, size = route.channels, len(packet)
        until = min(now, self.next_commit()) + _SAME
        while hop < len(channels):
            channel = channels[hop]
            if first - channel.lookahead > until:
                break
            crossed = channel.cross(first, last, size, self._random)
            if crossed is None:
                return
            first, last = crossed
            hop += 1
        when = last if hop == len(channels) else first - channels[hop].lookahead
        heappush(self._events, (when, number, hop, first, last, route, packet))
        heappush(self._wakes, last + route.remaining[hop])

    def _along(self, topology: Topology, source: str, target: str, media: dict[str, Channel]) -> list[Channel]:
        """Channels of a path: each hop's own, then the medium of the router at either end of it."""
        channels = []
        for hop in topology.path(source, target):
            channels.append(self.channels[hop.source, hop.target])
            channels += [media[end] for end in (hop.source, hop.target) if end in media]
        return channels

    def _look_ahead(self) -> None:
        for route in self.routes.values():
            reached = 0.0
            for channel in route.channels:
                channel.lookahead = min(channel.lookahead, reached)
                reached += channel.latency - channel.jitter
