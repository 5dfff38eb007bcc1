"""`--trace FILE`: every node's spans on the master's clock, as Chrome trace JSON."""

from pathlib import Path

from master.workers.cluster import Cluster
from master.workers.remote import RemoteWorker
from tpi.trace import NodeTrace, Page, Trace, clock, clock_offset, unroll, write_chrome

_READINGS = 8  # number of readings of each worker's clock; the one with the shortest round trip counts


def write_timeline(path: Path, own: Trace, master: str, cluster: Cluster, zero: int) -> dict[str, int]:
    """Write the spans of all nodes to `path`; times count from `zero` on the master's clock, in nanoseconds.

    Returns:
        The number of missing spans of each node that produced more spans than it could store.

    Raises:
        NodeError: if a worker is lost meanwhile.
        OSError: if the file cannot be written.
    """
    nodes = [NodeTrace(master, own.rows, dropped=own.dropped)]
    nodes += [_node_trace(cluster, worker) for worker in cluster.workers]
    write_chrome(path, nodes, zero)
    return {node.node: node.dropped for node in nodes if node.dropped}


def _node_trace(cluster: Cluster, worker: RemoteWorker) -> NodeTrace:
    """Return a worker's spans as an iterator that fetches one page of spans at a time."""
    offset = clock_offset([_read_clock(cluster, worker) for _ in range(_READINGS)])
    dropped = cluster.spans(worker, count=0).dropped

    def page(first: int) -> Page:
        spans = cluster.spans(worker, first)
        return spans.names, spans.rows

    return NodeTrace(worker.name, unroll(page), offset, dropped)


def _read_clock(cluster: Cluster, worker: RemoteWorker) -> tuple[int, int, int]:
    """Return three clocks in `tpi.trace.clock` nanoseconds: this process's, a worker's, and this process's
    afterwards.
    """
    return clock(), cluster.spans(worker, count=0).clock, clock()  # the order of the three calls matters
