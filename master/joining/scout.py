"""Measures workers before they are used; who would slow the rest is kept in reserve until it has become better."""

from collections.abc import Callable, Iterable
from queue import Empty, SimpleQueue
from threading import Event, Lock, Thread
from time import monotonic

from master.joining.measured import MeasuredWorkers
from master.workers.places import WorkerId
from master.workers.remote import RemoteWorker
from tpi.keys.door import leaves_machine
from tpi.net.sockets import split_address
from tpi.system.threads.turns import Turns

_EVERY_S = 60.0  # between two looks at those in reserve
_STOP_S = 5.0


class Scout:
    """Who is kept in reserve, and a thread that measures, from the first worker on. All methods are for any thread."""

    def __init__(self, measured: MeasuredWorkers | None, seek: Callable[[WorkerId], None]) -> None:
        """`seek` hears of those in reserve who are to be called. None as `measured`: nobody is ever looked at."""
        self._measured, self._seek = measured, seek
        self._kept: dict[WorkerId, None] = {}  # in the order in which they came
        self._come: SimpleQueue[RemoteWorker | None] = SimpleQueue()  # None: it is over
        self._lock = Lock()
        self._over = Event()
        self._thread: Thread | None = None
        self._turns = Turns("measuring workers")

    def look_over(self, worker: RemoteWorker) -> None:
        """For `master.workers.recruits.Recruits.look_over`: returns at once; it is admitted when it was measured.

        Who is on this machine needs no measuring.
        """
        if self._measured is None or not leaves_machine(split_address(worker.address)[0]):
            worker.admitted = True
            return
        self._come.put(worker)
        self._begin()

    @property
    def kept(self) -> list[WorkerId]:
        """Who is in reserve now."""
        with self._lock:
            return list(self._kept)

    def keeps(self, address: str, key: bytes) -> bool:
        """Whether the owner of `key` is in reserve as it is at `address`; elsewhere it may be nearer."""
        return WorkerId(address, key) in self.kept

    def keep(self, workers: Iterable[WorkerId]) -> None:
        """These are in reserve."""
        with self._lock:
            self._kept.update(dict.fromkeys(workers))
        if self.kept and self._measured is not None:
            self._begin()

    def call(self, worker: WorkerId) -> None:
        """Have one sought, which is not in reserve any more."""
        with self._lock:
            kept = worker in self._kept
            self._kept.pop(worker, None)
        if kept:
            self._seek(worker)

    def forget(self, keys: Iterable[bytes]) -> None:
        """The owners of `keys` take part: nothing is kept of where else they were."""
        owners = set(keys)
        with self._lock:
            self._kept = {one: None for one in self._kept if one.key not in owners}

    def close(self) -> None:
        """End the thread."""
        self._over.set()
        self._come.put(None)
        if self._measured is not None:
            self._measured.close()
        if self._thread is not None:
            self._thread.join(_STOP_S)

    def measure(self, wait_s: float = 0.0) -> None:
        """Measure those who have come, and who comes within so many seconds; whatever that finds, they are admitted."""
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
        """Call those in reserve who have become better. Who comes meanwhile does not wait until all are looked at."""
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
