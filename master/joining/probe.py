"""Measuring workers before they are used. Slow workers stay in reserve until they become faster."""

from collections.abc import Callable, Iterable
from queue import Empty, SimpleQueue
from threading import Event, Lock, Thread
from time import monotonic

from master.joining.measured import MeasuredWorkers
from master.workers.places import WorkerId
from master.workers.remote import RemoteWorker
from tpi.keys.policy import leaves_machine
from tpi.net.sockets import split_address
from tpi.system.threads.turns import Turns

_EVERY_S = 60.0  # seconds between two measurements of the workers in reserve
_STOP_S = 5.0


class WorkerProbe:
    """The workers in reserve, and a thread that measures new workers and those in reserve.

    All methods may be called from any thread.
    """

    def __init__(self, measured: MeasuredWorkers | None, seek: Callable[[WorkerId], None]) -> None:
        """Create a probe with an empty reserve. `seek` is called with each worker in reserve that is to join.

        If `measured` is None, no worker is measured.
        """
        self._measured, self._seek = measured, seek
        self._kept: dict[WorkerId, None] = {}  # the workers in reserve, in order of arrival
        self._come: SimpleQueue[RemoteWorker | None] = SimpleQueue()  # None ends the thread
        self._lock = Lock()
        self._over = Event()
        self._thread: Thread | None = None
        self._turns = Turns("measuring workers")

    def look_over(self, worker: RemoteWorker) -> None:
        """Queue a worker for measuring, and return at once; the worker is admitted after the measurement.

        A worker on this machine is admitted at once. `master.workers.recruits.Recruits` calls this as its `look_over`.
        """
        if self._measured is None or not leaves_machine(split_address(worker.address)[0]):
            worker.admitted = True
            return
        self._come.put(worker)
        self._begin()

    @property
    def kept(self) -> list[WorkerId]:
        """The workers that are in reserve now."""
        with self._lock:
            return list(self._kept)

    def keeps(self, address: str, key: bytes) -> bool:
        """Return True if the owner of `key` is in reserve at `address`.

        Other addresses do not count, because the link to another address may be faster.
        """
        return WorkerId(address, key) in self.kept

    def keep(self, workers: Iterable[WorkerId]) -> None:
        """Put workers in reserve."""
        with self._lock:
            self._kept.update(dict.fromkeys(workers))
        if self.kept and self._measured is not None:
            self._begin()

    def call(self, worker: WorkerId) -> None:
        """Take a worker out of reserve, and let it join."""
        with self._lock:
            kept = worker in self._kept
            self._kept.pop(worker, None)
        if kept:
            self._seek(worker)

    def forget(self, keys: Iterable[bytes]) -> None:
        """Take the owners of `keys` out of reserve at all addresses, because they take part now."""
        owners = set(keys)
        with self._lock:
            self._kept = {one: None for one in self._kept if one.key not in owners}

    def close(self) -> None:
        """Stop the thread that measures workers."""
        self._over.set()
        self._come.put(None)
        if self._measured is not None:
            self._measured.close()
        if self._thread is not None:
            self._thread.join(_STOP_S)

    def measure(self, wait_s: float = 0.0) -> None:
        """Measure the workers in the queue and those that come within `wait_s` seconds. Then admit each."""
        assert self._measured
        ends = monotonic() + wait_s
        while not self._over.is_set():
            try:
                worker = self._come.get(timeout=max(0.0, ends - monotonic()))
            except Empty:
                return
            if worker is not None:
                try:
                    self._measured.ask([worker.address])
                finally:
                    worker.admitted = True

    def look(self) -> None:
        """Measure the workers in reserve, after new ones. Let a worker join if it has become faster."""
        assert self._measured
        for one in self.kept:
            self.measure()
            if not self._over.is_set() and self._measured.improved(one):
                self.call(one)

    def _begin(self) -> None:
        with self._lock:
            begin = self._thread is None and not self._over.is_set()
            if begin:
                self._thread = Thread(target=self._loop, name="scout", daemon=True)
        if begin and self._thread:
            self._thread.start()

    def _loop(self) -> None:
        while not self._over.is_set():
            with self._turns.one():
                self.measure(_EVERY_S)
                self.look()
