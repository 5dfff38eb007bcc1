"""Is the network as specified? Measures delay and bandwidth between devices, from inside their namespaces.

One process has a socket in every namespace, so both ends of a packet read the same clock: the kernel's time stamp on
arrival minus the time of sending is the one-way delay, however late this process wakes up to read it.
"""

import os
import select
import socket
import statistics
import struct
import time
from dataclasses import dataclass
from itertools import combinations

from testbed.launch import Testbed
from testbed.namespaces import inside
from testbed.topology import UNLIMITED
from testbed.units import format_rate
from tpi.errors import TestbedError

RELATIVE, ABSOLUTE = 0.10, 0.3e-3  # how far off a round trip may be: the larger of a fraction and seconds
ROUNDS = 4
_PINGS = 7
_SPACING = 0.6e-3  # seconds between two pings
_TRAIN_SECONDS, _TRAIN_MIN, _TRAIN_MAX = 0.06, 40, 1500
_PORT = 9
_SO_TIMESTAMPNS = 35
_PACKET = struct.Struct("IId")  # round, sender, time of sending
_BUFFER = 64 << 20


@dataclass(frozen=True)
class Measured:
    """A pair of devices: round trip in seconds, bandwidth in bits per second from the first to the second."""

    pair: tuple[str, str]
    expected: float
    measured: float
    quantity: str  # "round trip" or "bandwidth"
    tolerance: float

    @property
    def off(self) -> bool:
        """Whether it misses its figure by more than the tolerance."""
        return abs(self.measured - self.expected) > self.tolerance

    def __str__(self) -> str:
        first, second = self.pair
        if self.quantity == "bandwidth":
            return f"bandwidth {first} -> {second} is {format_rate(self.measured)}, not {format_rate(self.expected)}"
        return f"round trip {first} - {second} is {self.measured * 1e3:.2f} ms, not {self.expected * 1e3:.2f} ms"


def verify(bed: Testbed) -> list[Measured]:
    """Measure every pair's round trip, and the bandwidth into and out of every device.

    Raises:
        TestbedError: if one stays off by more than 10% (for a round trip, or 0.3 ms if that is more) after `ROUNDS` tries.
    """
    with Probe(bed) as probe:
        if bed.record.backend == "tun":
            _calibrate(bed, probe)
        results: dict[tuple[str, tuple[str, str]], Measured] = {}
        wanted: set[tuple[str, str]] | None = None  # all
        for _ in range(ROUNDS):
            for one in [*_round_trips(bed, probe, wanted), *_bandwidths(bed, probe, wanted)]:
                results[one.quantity, one.pair] = one
            bad = [one for one in results.values() if one.off]
            if not bad:
                return list(results.values())
            wanted = {one.pair for one in bad}
    raise TestbedError(f"the links are not as specified: {'; '.join(map(str, bad[:3]))} ({len(bad)} in all); is the host busy?")


class Probe:
    """Sockets in all namespaces of a testbed."""

    def __init__(self, bed: Testbed) -> None:
        self._sockets: list[socket.socket] = []
        self._addresses = [member.address for member in bed.record.devices]
        self._size = bed.record.mtu - 28  # IP and UDP headers
        self._round = 0
        for member in bed.record.devices:
            descriptor = os.open(member.namespace, os.O_RDONLY | os.O_CLOEXEC)
            try:
                with inside(descriptor):
                    self._sockets.append(self._socket(member.address))
            finally:
                os.close(descriptor)

    def _socket(self, address: str) -> socket.socket:
        probe = socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        probe.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
        probe.setsockopt(socket.SOL_SOCKET, 33, _BUFFER)  # SO_RCVBUFFORCE
        probe.setsockopt(socket.SOL_SOCKET, 32, _BUFFER)  # SO_SNDBUFFORCE
        probe.bind((address, _PORT))
        return probe

    def delays(self, pairs: list[tuple[int, int]], patience: float) -> dict[tuple[int, int], float]:
        """Median one-way seconds from the first to the second of each pair, from `_PINGS` small packets each."""
        self._round += 1
        seen: dict[tuple[int, int], list[float]] = {pair: [] for pair in pairs}
        for _ in range(_PINGS):
            for source, target in pairs:
                packet = _PACKET.pack(self._round, source, time.time())
                self._sockets[source].sendto(packet, (self._addresses[target], _PORT))
                self._collect(seen, _SPACING)
        deadline = time.monotonic() + patience
        while any(len(each) < _PINGS for each in seen.values()) and time.monotonic() < deadline:
            self._collect(seen, 0.01)
        return {pair: statistics.median(each) if each else UNLIMITED for pair, each in seen.items()}

    def _collect(self, seen: dict[tuple[int, int], list[float]], seconds: float) -> None:
        """Read what arrives within `seconds`."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            ready, _, _ = select.select(self._sockets, [], [], left)
            for target in (self._sockets.index(one) for one in ready):
                arrived, data = self._receive(target)
                number, source, sent = _PACKET.unpack_from(data)
                if number == self._round and (source, target) in seen:
                    seen[source, target].append(arrived - sent)

    def _receive(self, target: int) -> tuple[float, bytes]:
        """One packet and the time at which the kernel had it."""
        data, extra, _, _ = self._sockets[target].recvmsg(self._size, 64)
        for level, kind, stamp in extra:
            if (level, kind) == (socket.SOL_SOCKET, _SO_TIMESTAMPNS):
                seconds, nanoseconds = struct.unpack("qq", stamp[:16])
                return seconds + nanoseconds * 1e-9, data
        return time.time(), data

    def bandwidth(self, source: int, target: int, expected: float, patience: float) -> float:
        """Bits per second at which a train of full packets, sent at once, comes out at the other end."""
        self._round += 1
        count = int(min(max(expected * _TRAIN_SECONDS / 8 / self._size, _TRAIN_MIN), _TRAIN_MAX))
        head = _PACKET.pack(self._round, source, 0.0)
        packet = head.ljust(self._size, b"\0")
        stamps: list[float] = []
        for _ in range(count):
            self._sockets[source].sendto(packet, (self._addresses[target], _PORT))
        deadline = time.monotonic() + patience + count * self._size * 8 / expected
        while len(stamps) < count and (left := deadline - time.monotonic()) > 0:
            if not select.select([self._sockets[target]], [], [], left)[0]:
                break
            arrived, data = self._receive(target)
            if data.startswith(head[:8]):
                stamps.append(arrived)
        return _rate(stamps, (self._size + 28) * 8)

    def __enter__(self) -> "Probe":
        return self

    def __exit__(self, *error: object) -> None:
        for probe in self._sockets:
            probe.close()


def _rate(stamps: list[float], bits: int) -> float:
    """Bits per second of a train of packets of `bits`: the median over half its length, which a short stall leaves alone."""
    half = len(stamps) // 2
    if half == 0:
        return 0.0
    spans = [later - earlier for earlier, later in zip(stamps, stamps[half:], strict=False)]
    return half * bits / max(statistics.median(spans), 1e-9)


def _pairs(bed: Testbed) -> list[tuple[int, int]]:
    return list(combinations(range(len(bed.topology.devices)), 2))


def _names(bed: Testbed, pair: tuple[int, int]) -> tuple[str, str]:
    return bed.topology.devices[pair[0]].name, bed.topology.devices[pair[1]].name


def _patience(bed: Testbed) -> float:
    worst = [bed.topology.latency(*_names(bed, pair)) + bed.topology.jitter(*_names(bed, pair)) for pair in _pairs(bed)]
    return 2 * max(worst, default=0.0) + 0.25


def _calibrate(bed: Testbed, probe: Probe) -> None:
    """Tell the user-space link how much time it adds itself, so that it can take it off."""
    pairs = _pairs(bed)
    for _ in range(2):
        measured = probe.delays([*pairs, *((b, a) for a, b in pairs)], _patience(bed))
        errors = [
            delay - bed.topology.latency(*_names(bed, pair)) for pair, delay in measured.items() if delay != UNLIMITED
        ]
        if errors and not any(link.jitter for link in bed.topology.links):
            bed.ask("compensate", seconds=statistics.median(errors))


def _round_trips(bed: Testbed, probe: Probe, wanted: set[tuple[str, str]] | None) -> list[Measured]:
    pairs = [pair for pair in _pairs(bed) if wanted is None or _names(bed, pair) in wanted]
    delays = probe.delays([*pairs, *((b, a) for a, b in pairs)], _patience(bed))
    results = []
    for a, b in pairs:
        names = _names(bed, (a, b))
        expected = bed.topology.latency(*names) + bed.topology.latency(*names[::-1])
        tolerance = max(RELATIVE * expected, ABSOLUTE) + 2 * bed.topology.jitter(*names)
        results.append(Measured(names, expected, delays[a, b] + delays[b, a], "round trip", tolerance))
    return results


def _bandwidths(bed: Testbed, probe: Probe, wanted: set[tuple[str, str]] | None) -> list[Measured]:
    """Each device sends to the next: that is every device's own link in both directions."""
    count = len(bed.topology.devices)
    results = []
    for pair in [(i, (i + 1) % count) for i in range(count) if count > 1]:
        names = _names(bed, pair)
        expected = bed.topology.bandwidth(*names)
        if expected == UNLIMITED or (wanted is not None and names not in wanted):
            continue
        measured = probe.bandwidth(*pair, expected, _patience(bed))
        results.append(Measured(names, expected, measured, "bandwidth", RELATIVE * expected))
    return results
