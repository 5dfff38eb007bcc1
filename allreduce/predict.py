"""Predicted time of an allreduce by each algorithm over given links, in closed form.

Terms: n nodes, one-way latency T, payload S bytes in the wire format, F bytes in f32. A node's links share its adapter,
so it sends k payloads in k S / B, where B is the bandwidth of its best link. Two times are left out: that of the
additions, which is small compared with a home network's latency (TPI-LLM, section 3.2), and the time that the waves of
a two-shot save. For equal links the formulas are, per allreduce:

    star      2T + (n-1)(S + F)/B                        TPI-LLM, A.1
    mesh       T + (n-1) S/B                             every partial directly to all other nodes
    two-shot  2T + 2 S (n-1)/(n B)                       direct reduce-scatter and all-gather
    tree      2 ceil(log2(n+1) - 1) T + ...              level by level, up with S, down with F
    ring      2(n-1) T + (S + F)(n-1)/(n B)              Patarasuk and Yuan, 2009
"""

from collections.abc import Callable

from allreduce.chunks import chunks
from tpi.net.wire import wire_format
from tpi.topology.links import LinkTable


def _star(links: LinkTable, count: int, wire: str) -> float:
    return _fan(links, _bytes(count, wire)) + _fan(links, _bytes(count, "f32"))


def _fan(links: LinkTable, payload: int) -> float:
    """Return the seconds to send one payload between the master and each worker.

    The time is limited by the slowest link or by the master's adapter.
    """
    slowest = max(links.between(0, rank).seconds(payload) for rank in range(1, links.size))
    master = (links.size - 1) * payload / links.bytes_per_s(0)
    return max(slowest, max(links.between(0, rank).latency_s for rank in range(1, links.size)) + master)


def _exchange(links: LinkTable, payload: float) -> float:
    """Return the seconds to send one payload from every node to every other.

    The time is limited by the slowest link or by the slowest adapter.
    """
    slowest = max(link.seconds(payload) for link in links.links.values())
    adapter = max((links.size - 1) * payload / links.bytes_per_s(rank) for rank in range(links.size))
    return max(slowest, links.latency_s() + adapter)


def _mesh(links: LinkTable, count: int, wire: str) -> float:
    return _exchange(links, _bytes(count, wire))


def _two_shot(links: LinkTable, count: int, wire: str) -> float:
    return 2 * _exchange(links, _bytes(_largest_chunk(links, count), wire))


def _tree(links: LinkTable, count: int, wire: str) -> float:
    def subtree(rank: int, payload: int) -> float:
        children = [child for child in (2 * rank + 1, 2 * rank + 2) if child < links.size]
        shared = len(children) * payload / links.bytes_per_s(rank)
        return max((subtree(c, payload) + links.between(rank, c).latency_s for c in children), default=0.0) + shared

    return subtree(0, _bytes(count, wire)) + subtree(0, _bytes(count, "f32"))


def _ring(links: LinkTable, count: int, wire: str) -> float:
    chunk, neighbours = _largest_chunk(links, count), [(rank, (rank + 1) % links.size) for rank in range(links.size)]
    turn = [max(links.between(a, b).seconds(_bytes(chunk, w)) for a, b in neighbours) for w in (wire, "f32")]
    return (links.size - 1) * sum(turn)


def _bytes(count: int, wire: str) -> int:
    return wire_format(wire).nbytes(count)


def _largest_chunk(links: LinkTable, count: int) -> int:
    chunk = chunks(count, links.size)[0]
    return int(chunk.stop - chunk.start)


PREDICTIONS: dict[str, Callable[[LinkTable, int, str], float]] = {
    "star": _star,
    "mesh": _mesh,
    "two-shot": _two_shot,
    "tree": _tree,
    "ring": _ring,
}


def predict(name: str, links: LinkTable, count: int, wire: str) -> float:
    """Return the predicted seconds of one allreduce with the algorithm `name`, if all nodes start it together.

    `count` is the number of values, and `wire` the format in which partial results travel.
    """
    return PREDICTIONS[name](links, count, wire) if links.size > 1 else 0.0
