"""Verification of a testbed's network by measuring every pair's round trip and every device's bandwidth."""

import statistics
import time
from dataclasses import dataclass
from itertools import combinations

from testbed.checks.probe import HostProbe
from testbed.launch import Testbed
from tpi.errors import TestbedError
from tpi.topology.topology import UNLIMITED
from tpi.topology.units import format_rate

RELATIVE, ABSOLUTE = 0.10, 0.3e-3  # tolerance of a round trip: the larger of a fraction and a number of seconds
ROUNDS = 8
_BREATH = 0.1  # pause in seconds, times the number of rounds so far, to let a busy machine calm down
_TRAIN_SECONDS = 0.08


@dataclass(frozen=True)
class LinkMeasurement:
    """A measurement for a pair of devices, and the expected value.

    A round trip is in seconds. A bandwidth is in bits per second, from the first to the second device.
    """

    pair: tuple[str, str]
    expected: float
    measured: float
    quantity: str  # "round trip" or "bandwidth"
    tolerance: float

    @property
    def out_of_tolerance(self) -> bool:
        """True if the measurement differs from the expected value by more than the tolerance."""
        return abs(self.measured - self.expected) > self.tolerance

    def __str__(self) -> str:
        first, second = self.pair
        if self.quantity == "bandwidth":
            return f"bandwidth {first} -> {second} is {format_rate(self.measured)}, not {format_rate(self.expected)}"
        return f"round trip {first} - {second} is {self.measured * 1e3:.2f} ms, not {self.expected * 1e3:.2f} ms"


def verify(bed: Testbed) -> list[LinkMeasurement]:
    """Measure every pair's round trip, and the bandwidth into and out of every device. Return all measurements.

    Raises:
        TestbedError: if a measurement is off by more than 10% in all of `ROUNDS` rounds. A round trip may be off by 0.3
            ms even if that is more than 10%.
    """
    with HostProbe(bed.record) as probe:
        results: dict[tuple[str, tuple[str, str]], LinkMeasurement] = {}
        wanted: set[tuple[str, str]] | None = None  # None: all pairs
        for attempt in range(ROUNDS):
            time.sleep(_BREATH * attempt)
            if bed.record.backend == "tun":  # in each round, because a machine's speed varies
                _calibrate(bed, probe)
            for one in [*_round_trips(bed, probe, wanted), *_bandwidths(bed, probe, wanted)]:
                results[one.quantity, one.pair] = one
            bad = [one for one in results.values() if one.out_of_tolerance]
            if not bad:
                return list(results.values())
            wanted = {one.pair for one in bad}
    which = "; ".join(map(str, bad[:3]))
    raise TestbedError(
        f"{len(bad)} links are not as specified ({which}): stop other programs on this machine, or use lower rates"
    )


def _pairs(bed: Testbed) -> list[tuple[int, int]]:
    return list(combinations(range(len(bed.topology.devices)), 2))


def _names(bed: Testbed, pair: tuple[int, int]) -> tuple[str, str]:
    return bed.topology.devices[pair[0]].name, bed.topology.devices[pair[1]].name


def _calibrate(bed: Testbed, probe: HostProbe) -> None:
    """Measure the delay that the user-space link process adds, and make the process subtract it from every delay."""
    pairs = _pairs(bed)
    for _ in range(2):
        measured = probe.delays([*pairs, *((b, a) for a, b in pairs)])
        errors = [
            delay - bed.topology.latency(*_names(bed, pair)) for pair, delay in measured.items() if delay != UNLIMITED
        ]
        if errors and not any(link.jitter for link in bed.topology.links):
            bed.ask("compensate", seconds=statistics.median(errors))


def _round_trips(bed: Testbed, probe: HostProbe, wanted: set[tuple[str, str]] | None) -> list[LinkMeasurement]:
    pairs = [pair for pair in _pairs(bed) if wanted is None or _names(bed, pair) in wanted]
    delays = probe.delays([*pairs, *((b, a) for a, b in pairs)])
    results = []
    for a, b in pairs:
        names = _names(bed, (a, b))
        expected = bed.topology.latency(*names) + bed.topology.latency(*names[::-1])
        tolerance = max(RELATIVE * expected, ABSOLUTE) + 2 * bed.topology.jitter(*names)
        results.append(LinkMeasurement(names, expected, delays[a, b] + delays[b, a], "round trip", tolerance))
    return results


def _bandwidths(bed: Testbed, probe: HostProbe, wanted: set[tuple[str, str]] | None) -> list[LinkMeasurement]:
    """Measure the bandwidth from each device to the next one, and from the last device to the first.

    Together these pairs cover each device's own link in both directions. If `wanted` is not None, only the pairs in it
    are measured.
    """
    count = len(bed.topology.devices)
    results = []
    for pair in [(i, (i + 1) % count) for i in range(count) if count > 1]:
        names = _names(bed, pair)
        expected = bed.topology.bandwidth(*names)
        if expected == UNLIMITED or (wanted is not None and names not in wanted):
            continue
        path = bed.topology.path(*names)
        shared = any(router.shared for router in bed.topology.routers)
        turns = bed.topology.latency(*names) if shared else None
        seconds = min(_TRAIN_SECONDS, *(hop.link.queue * 0.8 for hop in path))
        measured = probe.bandwidth(*pair, expected, seconds, any(hop.link.loss for hop in path), turns)
        tolerance = RELATIVE + sum(hop.link.loss for hop in path)
        results.append(LinkMeasurement(names, expected, measured, "bandwidth", tolerance * expected))
    return results
