"""All packets under way in an emulated home: a topology as the channels and routes of `native/channels.hpp`.

That file describes the arithmetic and its assumptions. No clocks and no sockets are used: times are seconds, passed in.
"""

from testbed import _link
from tpi.topology.topology import Topology


class Emulator:
    """A model of when packets that leave one device arrive at another. Devices are numbered as in the topology."""

    def __init__(self, topology: Topology, seed: int = 0) -> None:
        self.native = _link.Emulator(len(topology.devices), seed)
        self.channels: dict[tuple[str, str], _link.Channel] = {}  # channels of links, by source and target
        self._topology = topology
        self._numbers: dict[tuple[str, str], int] = {}
        for link in topology.links:
            for ends in (link.ends, (link.ends[1], link.ends[0])):
                figures = (link.bandwidth, link.latency, link.jitter, link.loss, link.queue)
                self._numbers[ends] = number = self.native.add_channel(*figures)
                self.channels[ends] = self.native.channel(number)
        self._media = {
            router.name: self.native.add_channel(router.shared, 0.0, 0.0, 0.0, 0.5)
            for router in topology.routers
            if router.shared is not None
        }
        names = [device.name for device in topology.devices]
        for i, source in enumerate(names):
            for j, target in enumerate(names):
                if i != j:
                    self.native.add_route(i, j, self._along(source, target))

    def send(self, now: float, source: int, target: int, packet: bytes) -> None:
        """Send `packet` from device `source` to `target` at `now`. Call `due(now)` first."""
        self.native.send(now, source, target, packet)

    def due(self, now: float, slack: float = 0.0) -> list[tuple[float, int, bytes]]:
        """Remove and return the packets that arrive by `now` + `slack` seconds, in order: time due, device, packet."""
        return self.native.due(now, slack)

    def next_event(self) -> float:
        """Return the time at which `due` has to be called next; infinity if no packet is under way."""
        return self.native.next_event()

    @property
    def dropped(self) -> int:
        """Number of packets dropped by cut links, full queues and loss so far."""
        return self.native.dropped

    def _along(self, source: str, target: str) -> list[int]:
        """Return the channels that a packet from `source` to `target` passes, in order.

        For each hop, these are the channel of the link and then the shared media (Wi-Fi) of the routers at its ends.
        """
        numbers = []
        for hop in self._topology.path(source, target):
            numbers.append(self._numbers[hop.source, hop.target])
            numbers += [self._media[end] for end in (hop.source, hop.target) if end in self._media]
        return numbers
