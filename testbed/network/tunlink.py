"""The user-space link: one process that carries all packets between the TUN devices of a testbed.

It sleeps until a packet arrives or is due, and handles all that is ready per wake-up (`native/link.cpp`). With
real-time priority, if the kernel grants it, it is punctual while the devices' programs use all cores.
"""

import socket
import sys
import time
from collections.abc import Callable
from typing import Any

from testbed import _link
from testbed.network.channels import Emulator
from testbed.network.namespaces import VNET_HEADER, sharpen_timers
from tpi.topology.topology import Topology

MTU = 9000
_MAX_COMPENSATION = 300e-6  # seconds


class TunLink:
    """A link process for the TUN devices of `topology`, one per device, in its order.

    Args:
        tuns: non-blocking descriptors of the TUN devices. The caller closes them after use.
    """

    def __init__(self, topology: Topology, tuns: list[int]) -> None:
        self.emulator = Emulator(topology)
        addresses = [socket.inet_aton(topology.address(device.name)) for device in topology.devices]
        numbers = [int.from_bytes(address, sys.byteorder) for address in addresses]
        self._link = _link.Link(self.emulator.native, tuns, numbers, VNET_HEADER)
        self._base = {ends: (c.latency, c.seconds_per_byte) for ends, c in self.emulator.channels.items()}
        self.reset()

    def reset(self) -> None:
        """Set all totals back to zero."""
        self._link.traffic = _link.Traffic()
        self._started, self._cpu_started = time.monotonic(), time.process_time()
        self._dropped = self.emulator.dropped

    def serve(self, others: dict[int, Callable[[], bool]]) -> None:
        """Carry packets until a handler returns False.

        Args:
            others: handlers by descriptor, called when the descriptor is readable.
        """
        sharpen_timers()
        while others[self._link.serve(list(others))]():
            pass

    def compensate(self, seconds: float) -> None:
        """Shorten every delay by `seconds` more, to make up for the time that this process adds.

        In total, at most `_MAX_COMPENSATION` seconds are subtracted.
        """
        wanted = max(self._link.compensation + seconds, 0.0)
        if wanted <= _MAX_COMPENSATION:
            self._link.compensation = wanted

    def report(self) -> dict[str, Any]:
        """Return the totals: CPU as a fraction of one core, packets, bytes, drops, lateness in milliseconds."""
        wall = time.monotonic() - self._started
        traffic = self._link.traffic
        packets = max(traffic.packets, 1)
        return {
            "seconds": wall,
            "cpu": (time.process_time() - self._cpu_started) / wall,
            "packets": traffic.packets,
            "bytes": traffic.sent_bytes,
            "wakeups": traffic.wakeups,
            "dropped": self.emulator.dropped - self._dropped,
            "late_ms_mean": traffic.late_seconds / packets * 1e3,
            "late_ms_worst": traffic.late_worst * 1e3,
            "compensation_ms": self._link.compensation * 1e3,
        }

    def cut(self, device: str) -> None:
        """Drop every packet to and from `device`."""
        for channel in self._of(device).values():
            channel.cut = True

    def heal(self, device: str) -> None:
        """Undo `cut` and `slow`: all packets pass again, with the bandwidth and latency of the device's links."""
        for ends, channel in self._of(device).items():
            channel.cut = False
            channel.latency, channel.seconds_per_byte = self._base[ends]

    def slow(self, device: str, bandwidth: float | None, latency: float) -> None:
        """Limit the links of the device to `bandwidth` bits per second and add `latency` seconds to their delay.

        If `bandwidth` is None, the links keep their own.
        """
        for ends, channel in self._of(device).items():
            base, seconds_per_byte = self._base[ends]
            channel.latency = base + latency
            channel.seconds_per_byte = max(seconds_per_byte, 8 / bandwidth if bandwidth else 0.0)

    def _of(self, device: str) -> dict[tuple[str, str], _link.Channel]:
        return {ends: channel for ends, channel in self.emulator.channels.items() if device in ends}
