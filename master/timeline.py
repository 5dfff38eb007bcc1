"""`--trace FILE`: every node's spans on the master's clock, as Chrome trace JSON."""

from pathlib import Path

from master.cluster import Cluster
from tpi.trace import NodeTrace, Trace, clock_offset, write_chrome
from worker.spans import unpack_spans

_READINGS = 8  # of each worker's clock; the one with the shortest round trip counts


def write_timeline(path: Path, own: Trace, master: str, cluster: Cluster) -> None:
    """Collect the workers' spans and write them beside the master's own.

    Raises:
        NodeError: if a worker is lost meanwhile.
        OSError: if the file cannot be written.
    """
    traces = [NodeTrace(master, own.rows)]
    for remote in cluster.remotes:
        readings = [cluster.read_clock(remote) for _ in range(_READINGS)]
        offset = clock_offset(readings)
        traces.append(NodeTrace(remote.name, unpack_spans(cluster.spans(remote)), offset))
    write_chrome(path, traces)
