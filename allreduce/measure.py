"""Measurement of a group's links: round-trip time and bandwidth of every pair, over the connections that it will use.

Pairs without a common node are measured at the same time, in the rounds of a round-robin tournament. The lower rank of
a pair starts. The master decides which pairs are measured, since it has the cache, and collects the results.
"""

from time import perf_counter

import numpy as np

from allreduce.base import F32
from allreduce.transport import Transport
from tpi.net.wire import EXACT
from tpi.topology.links import Link, LinkTable

LEAST_S = 2.0  # a measurement takes at most this many seconds,
_ROUND_TRIPS = 25  # or this many of the slowest round trips if that is longer
_PINGS = 8
_MESSAGES = 64  # limit of messages per pair
_PROBE_VALUES = (1 << 12, 1 << 14, 1 << 16, 1 << 18)  # 16 KiB to 1 MiB
PLAUSIBLE = ((1e-9, 1.0), (1e4, 1e13))  # least and greatest accepted latency in seconds and bytes per second
_ENOUGH_S = 0.02  # a probe that takes this long measures the bandwidth well enough


def rounds(size: int) -> list[list[tuple[int, int]]]:
    """Return rounds of pairs of ranks below `size`: every pair occurs once, and no rank is in two pairs of a round.

    The rounds are made by the circle method.
    """
    seats = [*range(size), *([-1] if size % 2 else [])]
    half = len(seats) // 2
    result = []
    for _ in range(len(seats) - 1):
        pairs = zip(seats[:half], reversed(seats[half:]), strict=True)
        result.append([(min(pair), max(pair)) for pair in pairs if min(pair) >= 0])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return result


def measure_links(transport: Transport, known: dict[tuple[int, int], Link], seconds: float = LEAST_S) -> LinkTable:
    """Measure the links between all nodes, and return them together with the `known` ones. Every node must call this.

    This takes at most `seconds`, or 25 of the slowest round trips if that is longer, and then one probe of the slowest
    link.

    Args:
        transport: the messages of the group.
        known: on the master, links that are not measured again, by the ranks of both ends; not used on workers.
        seconds: limit of the time.
    """
    spec = transport.spec
    wanted = share(transport, _mask(spec.size, known)).reshape(spec.size, spec.size)
    found = np.zeros((spec.size, 2), np.float32)  # latency and bandwidth of this node's links to higher ranks
    turns = rounds(spec.size)
    number = transport.box.reserve(len(turns) * _MESSAGES)
    for turn, pairs in enumerate(turns):
        for a, b in pairs:
            if spec.rank in (a, b) and wanted[a, b]:
                pair = _Pair(transport, b if spec.rank == a else a, number + turn * _MESSAGES)
                if spec.rank == a:
                    found[b] = pair.lead(seconds / len(turns))
                else:
                    pair.follow()
    return _assemble(transport, found, known)


def share(transport: Transport, values: F32) -> F32:
    """Return the master's 1-D `values` on every node."""
    number = transport.box.reserve(1)
    if transport.spec.rank == 0:
        transport.box.send(range(1, transport.spec.size), number, values, EXACT.code)
        return values
    out = np.empty_like(values)
    transport.box.receive(0, number, out, EXACT.code)
    return out


def plausible(claims: F32) -> F32:
    """Return `claims` clipped to plausible ranges. NaN becomes the lower limit.

    `claims` are the latencies in seconds and the bandwidths in bytes per second, `[..., 2]`, that nodes have sent.
    """
    return np.clip(np.nan_to_num(claims, nan=0.0), *(np.array(bound, np.float32) for bound in PLAUSIBLE))


def _mask(size: int, known: dict[tuple[int, int], Link]) -> F32:
    mask = np.ones((size, size), np.float32)
    for pair in known:
        mask[pair] = 0
    return mask.reshape(-1)


class _Pair:
    """One node's side of the measurement of the link to another node. `number` is the number of the next message."""

    def __init__(self, transport: Transport, peer: int, number: int) -> None:
        self._transport, self._peer, self._number = transport, peer, number

    def lead(self, budget: float) -> tuple[float, float]:
        """Measure the link, and return its latency in seconds and its bandwidth in bytes per second.

        The measurement takes about `budget` seconds, or a few round trips if those take longer.
        """
        began = perf_counter()
        self._ask(1)  # opens the connection and warms up caches
        trips = [self._ask(1)]
        limit = max(budget, _ROUND_TRIPS / _PINGS * trips[0])
        while len(trips) < _PINGS and perf_counter() - began < limit / 4:
            trips.append(self._ask(1))
        trip, rate = min(trips), 1.0
        for count in _PROBE_VALUES:
            extra = max(self._ask(count) - trip, 1e-6)
            rate = 4 * count / extra
            if extra > _ENOUGH_S or perf_counter() - began > limit:
                break
        self._say(0)
        return trip / 2, rate

    def follow(self) -> None:
        """Answer the other side's requests until it sends the last one."""
        while count := self._hear(1):
            self._hear(count)
            self._say(1)

    def _ask(self, count: int) -> float:
        """Return the seconds until the other side has answered a message of `count` values."""
        started = perf_counter()
        self._say(count)
        self._send(np.zeros(count, np.float32))
        self._hear(1)
        return perf_counter() - started

    def _say(self, count: int) -> None:
        self._send(np.array([count], np.float32))

    def _send(self, values: F32) -> None:
        self._transport.box.send((self._peer,), self._number, values, EXACT.code)
        self._number += 1

    def _hear(self, count: int) -> int:
        values = np.empty(count, np.float32)
        self._transport.box.receive(self._peer, self._number, values, EXACT.code)
        self._number += 1
        return int(values[0]) if 0 <= values[0] <= max(_PROBE_VALUES) else 0  # NaN gives 0 too


def _assemble(transport: Transport, found: F32, known: dict[tuple[int, int], Link]) -> LinkTable:
    """Combine the results of all nodes on the master, and return the combined table on every node."""
    size, number = transport.spec.size, transport.box.reserve(1)
    table = np.zeros((size, size, 2), np.float32)
    if transport.spec.rank == 0:
        table[0] = found
        for rank in range(1, size):
            transport.box.receive(rank, number, table[rank].reshape(-1), EXACT.code)
        table = plausible(table)
        for pair, link in known.items():
            table[pair] = link.latency_s, link.bytes_per_s
    else:
        transport.box.send((0,), number, found.reshape(-1), EXACT.code)
    table = share(transport, table.reshape(-1)).reshape(size, size, 2)
    pairs = [(a, b) for a in range(size) for b in range(a + 1, size)]
    return LinkTable(size, {pair: Link(float(table[pair][0]), float(table[pair][1])) for pair in pairs})
