"""The user-space link: one process that carries all packets between the TUN devices of a testbed.

It sleeps in `select` until a packet comes or one is due, and moves everything that is ready per wake-up. With real-time
priority, where the kernel grants it, it keeps time while the devices' programs fill the cores.
"""

import gc
import os
import select
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from testbed.channels import Channel, Emulator
from testbed.namespaces import VNET_HEADER, sharpen_timers
from testbed.topology import UNLIMITED, Topology

MTU = 9000
_BURST = 32  # packets read from one device before the others get their turn
_SLACK = 20e-6  # seconds: what is due within them is delivered in this wake-up rather than the next
_MAX_COMPENSATION = 300e-6  # seconds
_TARGET = VNET_HEADER + 16  # offset of the destination address in what a TUN device hands over
_READ = 65536 + VNET_HEADER


@dataclass
class Traffic:
    """What the link has done since it started."""

    packets: int = 0
    sent_bytes: int = 0
    wakeups: int = 0
    late_seconds: float = 0.0  # summed over packets; against the time at which each was due
    late_worst: float = 0.0
    refused: int = 0  # packets that the receiving device would not take


class TunLink:
    """Carries packets between TUN devices, one per device of `topology`, in its order.

    Args:
        tuns: non-blocking descriptors of the TUN devices; the caller keeps and closes them.
    """

    def __init__(self, topology: Topology, tuns: list[int]) -> None:
        self.emulator = Emulator(topology)
        self.compensation = 0.0  # seconds that waking up costs: a packet left that long before it was read
        self._topology, self._tuns = topology, tuns
        self._names = [device.name for device in topology.devices]
        self._number = {socket.inet_aton(topology.address(name)): i for i, name in enumerate(self._names)}
        self._base = {ends: (c.latency, c.seconds_per_byte) for ends, c in self.emulator.channels.items()}
        self.reset()

    def reset(self) -> None:
        """Count from now on."""
        self.traffic = Traffic()
        self._started, self._cpu_started = time.monotonic(), time.process_time()
        self._dropped = self.emulator.dropped

    def serve(self, others: dict[int, Callable[[], bool]]) -> None:
        """Carry packets until a handler says stop.

        Args:
            others: handlers of further descriptors, called when theirs is readable; False ends the loop.
        """
        sharpen_timers()
        gc.disable()  # nothing here makes cycles, and a collection would hold packets up
        sources = {descriptor: number for number, descriptor in enumerate(self._tuns)}
        watched = [*sources, *others]
        emulator = self.emulator
        while True:
            wait = emulator.next_event() - time.monotonic()
            ready, _, _ = select.select(watched, [], [], None if wait == UNLIMITED else max(wait, 0.0))
            now = time.monotonic()
            self._deliver(now)
            for descriptor in ready:
                if descriptor in sources:
                    self._read(descriptor, sources[descriptor], now)
                elif not others[descriptor]():
                    return
            self._deliver(now)
            self.traffic.wakeups += 1

    def _read(self, descriptor: int, source: int, now: float) -> None:
        emulator, number = self.emulator, self._number
        for _ in range(_BURST):
            try:
                packet = os.read(descriptor, _READ)
            except BlockingIOError:
                return
            target = number.get(packet[_TARGET : _TARGET + 4])
            if target is not None and target != source:
                emulator.send(now - self.compensation, source, target, packet)

    def _deliver(self, now: float) -> None:
        traffic = self.traffic
        for due, target, packet in self.emulator.due(now, _SLACK):
            try:
                os.write(self._tuns[target], packet)
            except OSError:
                traffic.refused += 1  # as a real network card would: the packet is gone
                continue
            late = now - due
            traffic.packets += 1
            traffic.sent_bytes += len(packet) - VNET_HEADER
            traffic.late_seconds += late
            traffic.late_worst = max(traffic.late_worst, late)

    def compensate(self, seconds: float) -> None:
        """Take `seconds` more off every delay, unless that is more than this process could have added."""
        wanted = max(self.compensation + seconds, 0.0)
        if wanted <= _MAX_COMPENSATION:
            self.compensation = wanted

    def report(self) -> dict[str, Any]:
        """Figures for people and benchmarks: CPU as a fraction of one core, packets, bytes, drops, lateness in ms."""
        wall = time.monotonic() - self._started
        packets = max(self.traffic.packets, 1)
        return {
            "seconds": wall,
            "cpu": (time.process_time() - self._cpu_started) / wall,
            "packets": self.traffic.packets,
            "bytes": self.traffic.sent_bytes,
            "wakeups": self.traffic.wakeups,
            "dropped": self.emulator.dropped - self._dropped,
            "late_ms_mean": self.traffic.late_seconds / packets * 1e3,
            "late_ms_worst": self.traffic.late_worst * 1e3,
            "compensation_ms": self.compensation * 1e3,
        }

    def cut(self, device: str) -> None:
        """Drop every packet to and from `device`."""
        for channel in self._of(device).values():
            channel.cut = True

    def heal(self, device: str) -> None:
        """Undo `cut` and `slow`."""
        for ends, channel in self._of(device).items():
            channel.cut = False
            channel.latency, channel.seconds_per_byte = self._base[ends]

    def slow(self, device: str, bandwidth: float | None, latency: float) -> None:
        """Give the device's links `bandwidth` bits per second (None: as before) and `latency` more seconds each way."""
        for ends, channel in self._of(device).items():
            base, seconds_per_byte = self._base[ends]
            channel.latency = base + latency
            channel.seconds_per_byte = max(seconds_per_byte, 8 / bandwidth if bandwidth else 0.0)

    def _of(self, device: str) -> dict[tuple[str, str], Channel]:
        return {ends: channel for ends, channel in self.emulator.channels.items() if device in ends}
