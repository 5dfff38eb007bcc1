"""Sockets in all namespaces of a testbed, and measurements between them.

One process has both ends of each packet, so both are on one clock. The one-way delay is the kernel's time stamp on
arrival minus the time of sending, so a late wake-up of this process does not change it.
"""

import os
import select
import socket
import statistics
import struct
import time

from testbed.network.namespaces import inside
from testbed.state import TestbedRecord
from tpi.topology.topology import UNLIMITED

_PINGS = 7
_SPACING = 0.6e-3  # seconds between two pings
_TRAIN_PACKETS = 40  # least packets in a train
_SMALLEST, _LARGEST = 1400, 65000  # least and most bytes in a packet of a train
_PATIENCE = 1.0  # seconds to wait for packets that may be lost; longer than any round trip of a testbed
_PORT = 9
_SO_TIMESTAMPNS, _SO_SNDBUFFORCE, _SO_RCVBUFFORCE = 35, 32, 33
_PACKET = struct.Struct("IId")  # round, sender, time of sending
_BUFFER = 64 << 20


class HostProbe:
    """Sockets in all namespaces of a testbed. As a context manager, it closes the sockets at the end of the block."""

    def __init__(self, record: TestbedRecord) -> None:
        self._sockets: list[socket.socket] = []
        self._addresses = [host.address for host in record.devices]
        self._mtu = record.mtu
        self._round = 0
        for host in record.devices:
            descriptor = os.open(host.namespace, os.O_RDONLY | os.O_CLOEXEC)
            try:
                with inside(descriptor):
                    self._sockets.append(self._socket(host.address))
            finally:
                os.close(descriptor)

    def _socket(self, address: str) -> socket.socket:
        probe = socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        probe.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
        probe.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _BUFFER)
        probe.setsockopt(socket.SOL_SOCKET, _SO_SNDBUFFORCE, _BUFFER)
        probe.bind((address, _PORT))
        return probe

    def delays(self, pairs: list[tuple[int, int]]) -> dict[tuple[int, int], float]:
        """Return the median one-way delay in seconds for each pair (source, target), over `_PINGS` small packets."""
        self._round += 1
        seen: dict[tuple[int, int], list[float]] = {pair: [] for pair in pairs}
        for _ in range(_PINGS):
            for source, target in pairs:
                packet = _PACKET.pack(self._round, source, time.time())
                self._sockets[source].sendto(packet, (self._addresses[target], _PORT))
                self._collect(seen, _SPACING)
        deadline = time.monotonic() + _PATIENCE
        while any(len(each) < _PINGS for each in seen.values()) and time.monotonic() < deadline:
            self._collect(seen, 0.01)
        return {pair: statistics.median(each) if each else UNLIMITED for pair, each in seen.items()}

    def _collect(self, seen: dict[tuple[int, int], list[float]], seconds: float) -> None:
        """Read the packets that arrive within `seconds`, and add their delays to `seen`."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            ready, _, _ = select.select(self._sockets, [], [], left)
            for target in (self._sockets.index(one) for one in ready):
                arrived, data = self._receive(target)
                number, source, sent = _PACKET.unpack_from(data)
                if number == self._round and (source, target) in seen:
                    seen[source, target].append(arrived - sent)

    def _receive(self, target: int) -> tuple[float, bytes]:
        """Read one packet that the device `target` received.

        Return the kernel's time of arrival in seconds, and the packet.
        """
        data, extra, _, _ = self._sockets[target].recvmsg(_LARGEST, 64)
        for level, kind, stamp in extra:
            if (level, kind) == (socket.SOL_SOCKET, _SO_TIMESTAMPNS):
                seconds, nanoseconds = struct.unpack("qq", stamp[:16])
                return seconds + nanoseconds * 1e-9, data
        return time.time(), data

    def bandwidth(
        self, source: int, target: int, expected: float, seconds: float, lossy: bool, turns: float | None
    ) -> float:
        """Send a train of packets at once, and return the bits per second at which it arrives at the other end.

        Datagrams are larger than the links' packets if possible, so that sending is much faster than any link.

        Args:
            source: number of the sending device.
            target: number of the receiving device.
            expected: approximate result.
            seconds: how long the train should take. The queues on the path must be able to hold it.
            lossy: the path loses packets, so that large datagrams would rarely arrive complete.
            turns: None, or, if the path crosses a shared medium twice, its one-way delay in seconds. On such a path the
                first packets arrive faster than the last, so the time counts from the sending of the train.
        """
        self._round += 1
        largest = self._mtu - 28 if lossy else _LARGEST
        size = int(min(max(expected * seconds / 8 / _TRAIN_PACKETS, _SMALLEST), largest))
        count = int(max(expected * seconds / 8 / size, _TRAIN_PACKETS))
        head = _PACKET.pack(self._round, source, 0.0)
        started = time.time()
        for _ in range(count):
            self._sockets[source].sendto(head.ljust(size, b"\0"), (self._addresses[target], _PORT))
        stamps: list[float] = []
        deadline = time.monotonic() + _PATIENCE + seconds
        while len(stamps) < count and (left := deadline - time.monotonic()) > 0:
            if not select.select([self._sockets[target]], [], [], left)[0]:
                break
            arrived, data = self._receive(target)
            if data.startswith(head[:8]):
                stamps.append(arrived)
        fragments = -(-(size + 8) // (self._mtu - 20))
        bits = (size + 8 + 20 * fragments) * 8
        if turns is not None and stamps:
            return len(stamps) * bits / (stamps[-1] - started - turns)
        return _rate(stamps, bits)

    def __enter__(self) -> "HostProbe":
        return self

    def __exit__(self, *error: object) -> None:
        for probe in self._sockets:
            probe.close()


def _rate(stamps: list[float], bits: int) -> float:
    """Return the bits per second of a train of packets of `bits` bits each.

    Each packet is compared with the one half a train later. The median of these times counts, so that a short stall
    does not change the result.
    """
    half = len(stamps) // 2
    if half == 0:
        return 0.0
    spans = [later - earlier for earlier, later in zip(stamps, stamps[half:], strict=False)]
    return half * bits / max(statistics.median(spans), 1e-9)
