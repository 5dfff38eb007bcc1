"""The first exchange with workers: it finds the workers that answer, the reasons of the others, and names."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from master.workers.reach import ReachProbe, other_port
from master.workers.remote import RemoteWorker
from tpi.errors import NodeLost, NodeRefused
from tpi.net.sockets import split_address
from tpi.text import NAME_CHARACTERS

_PROBE_AFTER_S = 0.3  # seconds without a connection
_TRUST_AFTER_S = 0.6  # seconds, long enough for the probe to report first


class Meeting:
    """Workers that were called and have not all answered."""

    def __init__(self, workers: Sequence[RemoteWorker]) -> None:
        self._workers = workers
        self._probes: dict[str, ReachProbe] = {}

    def met(self, seconds: float) -> bool:
        """Return True if all workers have answered, `seconds` after they were called.

        Raises:
            NodeLost: if a worker cannot be reached.
            NodeRefused: if a machine that answers has no trusted key, or trusts none of this machine's.
        """
        if seconds > _PROBE_AFTER_S:
            self._probe()
        for worker in self._workers if seconds > _TRUST_AFTER_S else ():
            if obstacle := worker.obstacle():
                raise NodeRefused(worker.address, obstacle)
        return all(worker.hello for worker in self._workers)

    def no_answer(self) -> NodeLost:
        """Return the error for the first worker that has not answered in time."""
        worker = next(worker for worker in self._workers if not worker.hello)
        if not worker.connected:  # a machine that is on and has no firewall would refuse the connection at once
            return NodeLost(
                worker.address,
                f"nothing answers at {worker.address}; check that the address is right, that the machine is on, and "
                "that its firewall lets the worker's ports through (tpi doctor names them)",
            )
        return NodeLost(worker.address, other_port(worker.address))

    def close(self) -> None:
        """Wait for the probes to end."""
        for probe in self._probes.values():
            probe.close()

    def _probe(self) -> None:
        for worker in self._workers:
            if not worker.connected and worker.address not in self._probes:
                self._probes[worker.address] = ReachProbe(*split_address(worker.address))
        for address, probe in self._probes.items():
            if probe.found:
                raise NodeLost(address, probe.found)


@contextmanager
def meeting(workers: Sequence[RemoteWorker]) -> Iterator[Meeting]:
    """Yield a meeting; wait for its probes at the end of the block."""
    one = Meeting(workers)
    try:
        yield one
    finally:
        one.close()


def tell_apart(workers: Sequence[RemoteWorker]) -> None:
    """Append their addresses to the names of workers with equal names."""
    counts = Counter(worker.name for worker in workers)
    for worker in workers:
        if counts[worker.name] > 1:
            beside = f" ({worker.address})"
            worker.name = worker.name[: NAME_CHARACTERS - len(beside)] + beside
