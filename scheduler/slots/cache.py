"""A cache of weights in slots of memory, for units of any kind: it tracks pins, loads and waiting threads.

    cache = SlotCache(source, workers, stats)
    cache.expect(shelf, units)                # a prediction: loads begin
    with cache.hold(shelf, units) as slots:   # waits until all are loaded
        ...

A *shelf* decides which unit lies in which slot: it is an index with an eviction policy
(`scheduler.slots.shelf.PriorityShelf`). A *source* fills slots from the tier below. *Workers* are the threads that do
so: a cache's own threads, or the threads of a transfer queue. The layers of a model may be shelves of one cache.
"""

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

from scheduler.slots.shelf import Load, Shelf
from scheduler.slots.stats import LoadStats, ReadClock
from scheduler.slots.workers import LoadWorkers
from tpi.devices.base import Device
from tpi.errors import TpiError
from tpi.trace import OFF, NoTrace

LOOK_AGAIN = 1.0  # seconds after which a waiting thread checks if its load can still happen
S = TypeVar("S", bound=LoadStats)


class Source(ABC):
    """The disk or memory from which a cache fills its slots. Several threads call its methods."""

    checks = False  # True if `check` does something

    @abstractmethod
    def fill(self, loads: Sequence[Load], part: int) -> int:
        """Fill part number `part` of the slots of `loads`; return the number of bytes that were moved.

        Several loads that `joins` put together are filled by one call, in one part.

        Raises:
            Exception: if a load failed; the error names the file or unit.
        """

    def joins(self, loads: Sequence[Load], other: Load) -> bool:
        """Return True if `other` should be loaded together with `loads`, which are queued before it."""
        return False

    def check(self, load: Load) -> None:  # noqa: B027
        """Check the bytes of a load whose parts are all filled; raise an exception if the bytes are wrong."""


class SlotCache(Generic[S]):
    """Slots of one tier of memory. Any number of threads may wait; one at a time should pin.

    1. **Lock.** One lock guards shelves, queues and counts. Sources run without it.
    2. **In use.** A slot that is pinned or loading keeps its unit. Nothing writes to a pinned slot that is loaded.
    3. **Pin.** A hold pins all of its units first, then has missing units loaded, then waits for its own units only. If
       there is no room, it waits until unpinned loads end and free their slots. If there is still no room, the hold is
       refused.
    4. **Expect.** The units of a prediction are pinned like those of a hold if there is room; else the prediction is
       ignored. It ends with the next hold or prediction of the shelf, or with `abandon`.
    5. **Demand first.** Loads that a hold waits for begin before read-ahead. A hold of expected units turns their
       read-ahead into demand. If nothing is queued, `spare` may give a load. Each lane (link) has its own order.
    6. **Failure.** A failed load's error is raised by each hold that waits for it. A later hold loads the unit again,
       whether the failed slot is still pinned or was emptied with its last pin. So a hold also repeats a load ahead
       that failed earlier. `raise_failure` raises the last error, for memories in which no hold waits for a load.
    7. **Release.** With devices, slots are released after the calls that are queued on the devices. A hold without room
       waits for these releases once before it is refused.
    8. **Abandon.** An aborted step ends predictions and forgets the last failure. Its loads end, and their units stay.
       If one of them fails later, only a hold that waits for it raises the error.
    9. **Close.** When `close` returns, running loads have ended and no other begins. Waiting holds raise TpiError. If
       the workers are lost, holds raise it within a second. Pinned slots stay valid.
    """

    def __init__(
        self,
        source: Source,
        workers: LoadWorkers,
        stats: S,
        *,
        reads: ReadClock | None = None,
        trace: NoTrace = OFF,
        devices: Iterable[Device] = (),
        spare: Callable[[float], Load | None] = lambda speed: None,
    ) -> None:
        """Create a cache.

        Args:
            source: fills slots.
            workers: the threads that call `source`; the cache starts and closes the threads.
            stats: the counts, which the cache and its shelves change.
            reads: a clock of the reads, which another reader of the same disk may share; needed for `speed`.
            trace: recorder of loads and stalls.
            devices: the devices whose queued calls use the slots; empty: only the caller's thread uses them.
            spare: takes the `speed` and returns a load whose slots are marked as loading, or None; called under the
                lock if no load waits.
        """
        self.lock, self.stats = threading.Lock(), stats
        self.loaded_bytes = 0  # bytes that were loaded since the start
        self._done = threading.Condition(self.lock)
        self._source, self._workers, self._reads, self._trace = source, workers, reads, trace
        self._devices, self._spare = list(devices), spare
        self._demanded, self._ahead = deque[Load](), deque[Load]()
        self._unended = 0  # loads that were submitted and have neither ended nor been cancelled
        self._expected: dict[Shelf, tuple[Any, Any]] = {}  # units and slots that predictions pin
        self._failure: Exception | None = None
        self._aborts = 0  # calls of `abandon`
        self.closed = False
        workers.start(self._serve)

    @contextmanager
    def hold(self, shelf: Shelf, units: Any) -> Iterator[Any]:
        """Yield the slots of `units`, which are distinct, when all are loaded; hold them until the exit.

        Raises:
            Exception: the error of the source, if a load failed.
            TpiError: if `units` do not fit in addition to held units, or the cache is closed.
        """
        slots = self.enter(shelf, units)
        try:
            yield slots
        finally:
            self.release(shelf, slots)

    def enter(self, shelf: Shelf, units: Any) -> Any:
        """Begin a hold, which `release` ends; return the slots of `units` when all are loaded.

        Errors are those of `hold`.
        """
        slots = self.pin(shelf, units)
        try:
            self.wait(shelf, slots)
        except BaseException:
            self.release(shelf, slots)
            raise
        return slots

    def pin(self, shelf: Shelf, units: Any, least: int | None = None) -> Any:
        """Pin as many of `units`, from the first on, as fit, and start to load them; return their slots.

        If fewer than `least` units fit (None: fewer than all), raise TpiError and pin none.
        """
        least = len(units) if least is None else least
        with self.lock:
            slots = self._pin(shelf, units, least)
        if slots is None and self._devices:
            self.flush_releases()
            with self.lock:
                slots = self._pin(shelf, units, least)
        if slots is None:
            raise shelf.refuse(units[:least])
        return slots

    def wait(self, shelf: Shelf, slots: Any, enough: Callable[[], bool] | None = None) -> None:
        """Wait until the pinned `slots` are loaded or `enough()` returns True; raise the error of a failed load."""
        with self.lock:
            if shelf.loading(slots) and not (enough and enough()):
                began, name = time.perf_counter(), shelf.describe(slots)
                while shelf.loading(slots) and not (enough and enough()):
                    self.require_open()
                    self._done.wait(LOOK_AGAIN)
                ended = time.perf_counter()
                self.stats.stall_seconds += ended - began
                shelf.awaited(slots, began, ended)
                self._trace.add("stall", name, int(began * 1e9), int(ended * 1e9))
            if (error := shelf.failure(slots)) is not None:
                raise error

    def release(self, shelf: Shelf, slots: Any, device: Device | None = None) -> None:
        """Remove one pin from each of `slots`; if `device` is given, only after the calls that are queued on it."""
        if device is not None:
            device.start(lambda: self.release(shelf, slots))
            return
        with self.lock:
            if loads := shelf.release(slots):
                self.submit(loads)

    def expect(self, shelf: Shelf, units: Any) -> None:
        """Expect that the next hold of the shelf will be of `units`, and start to load them if there is room."""
        with self.lock:
            self._forget_expected(shelf)
            if not self.closed and shelf.room(units) == len(units):
                slots, loads = shelf.claim(units)
                self._expected[shelf] = (units, slots)
                self.submit(loads, ahead=True)

    def abandon(self) -> None:
        """Abort a step: give up all predictions, and forget the failures of its loads."""
        with self.lock:
            for shelf in list(self._expected):
                self._forget_expected(shelf)
            self._failure = None
            self._aborts += 1

    def raise_failure(self) -> None:
        """Raise the error of the last load that failed since the last call, if one did."""
        with self.lock:
            failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def drain(self) -> None:
        """Wait until no load is queued or running, whether or not it fails."""
        with self.lock:
            while self.queued and not self._stopped:
                self._done.wait(LOOK_AGAIN)

    def flush_releases(self) -> None:
        """Wait until all releases that were requested from devices have happened."""
        for device in self._devices:
            device.start(lambda: None).wait()

    def counts(self) -> S:
        """Return a copy of the present counts."""
        with self.lock:
            return self.stats.copy()

    def close(self) -> None:
        """Begin no more loads; return when the running ones have ended. Further calls do nothing."""
        with self.lock:
            self.closed = True
            self._done.notify_all()
        self._workers.close()

    # The methods below are called with the lock held.

    @property
    def queued(self) -> int:
        """Number of loads that are queued or running."""
        return self._unended

    @property
    def speed(self) -> float:
        """Mean bytes per second of loading since the start, counting only the time in which a read is in flight."""
        return self.loaded_bytes / ((self._reads and self._reads.seconds) or 1.0)

    def require_open(self) -> None:
        """Raise TpiError if the cache is closed or its workers are lost."""
        if self._stopped:
            raise TpiError("the memory of weights is closed; open the model again")

    def submit(self, loads: Sequence[Load], ahead: bool = False) -> None:
        """Queue `loads`, whose slots are marked as loading: as demand, or behind demand if `ahead` is True."""
        if loads:
            for load in loads:
                load.aborts = self._aborts
            (self._ahead if ahead else self._demanded).extend(loads)
            self._unended += len(loads)
            self._workers.kick([load for load in loads for _ in range(load.parts)])

    def kick(self, count: int) -> None:
        """Announce that `spare` may give `count` more loads."""
        self._workers.kick([None] * count)

    @property
    def _stopped(self) -> bool:
        return self.closed or self._workers.lost

    def _pin(self, shelf: Shelf, units: Any, least: int) -> Any:
        """Pin `units` as `pin` does; return their slots, or None if fewer than `least` units fit."""
        if self.closed:
            self.require_open()
        if self._expected:
            expected, slots = self._expected.get(shelf, (None, None))
            if expected is units and shelf.failure(slots) is None:
                del self._expected[shelf]
                self._promote(shelf)
                return slots
            self._forget_expected(shelf)
        while (count := shelf.room(units)) < least:
            if not shelf.settling:
                return None
            self._done.wait(LOOK_AGAIN)
            self.require_open()
        slots, loads = shelf.claim(units if count == len(units) else units[:count])
        if self._ahead:
            self._promote(shelf)
        if loads:
            self.submit(loads)
        return slots

    def _promote(self, shelf: Shelf) -> None:
        """Move a shelf's queued read-ahead to the end of the queue of demanded loads."""
        self._demanded.extend(load for load in self._ahead if load.shelf is shelf)
        self._ahead = deque(load for load in self._ahead if load.shelf is not shelf)

    def _forget_expected(self, shelf: Shelf) -> None:
        if (expected := self._expected.pop(shelf, None)) is not None:
            self.submit(shelf.release(expected[1]))

    # The methods below are called by the workers.

    def _serve(self, lane: int = 0) -> None:
        """Fill a part of the first load that may begin on a lane, with the loads that join it.

        Do nothing if no load may begin.
        """
        with self.lock:
            loads = [] if self.closed else self._take(lane)
            part = loads[0].begun - 1 if loads else 0
        if not loads:
            return
        began, moved, error = time.perf_counter(), 0, None
        if self._reads is not None:
            self._reads.begin_read()
        try:
            moved = self._source.fill(loads, part)
        except Exception as failure:  # noqa: BLE001 - the hold that waits for the load raises it
            error = failure
        if self._reads is not None:
            self._reads.end_read()
        with self.lock:
            if loads[0].name:
                self._trace.add("load", loads[0].name, int(began * 1e9), int(time.perf_counter() * 1e9))
            self.stats.read_bytes += moved
            self.loaded_bytes += moved
            for load in loads:
                self._end_part(load, part, error)

    def _end_part(self, load: Load, part: int, error: Exception | None) -> None:
        """Record that a part of a load has ended; after its last part, end the load."""
        if error is not None:
            load.error, load.parts = error, load.begun
        elif load.parts > 1:
            load.arrived(part)
        ended = load.running == 1 and load.begun >= load.parts
        if ended and self._source.checks and load.error is None and not load.cancelled:
            load.error = self._checked(load)
        load.running -= 1
        if ended:
            if load.error is not None or load.cancelled:  # it may have been cut short while it was queued
                self._demanded, self._ahead = (_without(queue, load) for queue in (self._demanded, self._ahead))
            self._unended -= 1
            if load.aborts == self._aborts:
                self._failure = load.error or self._failure
            load.shelf.end(load, load.error)
            if load.cancelled:  # loads that waited for its memory may begin
                self._workers.kick([None] * sum(one.parts - one.begun for one in (*self._demanded, *self._ahead)))
        if ended or load.followed:
            self._done.notify_all()

    def _checked(self, load: Load) -> Exception | None:
        """Release the lock while the source checks a load; return the error if its bytes are wrong."""
        self.lock.release()
        try:
            self._source.check(load)
        except Exception as error:  # noqa: BLE001 - the hold that waits for the load raises it
            return error
        finally:
            self.lock.acquire()
        return None

    def _take(self, lane: int) -> list[Load]:
        """Begin a part of the first load of `lane` that may begin; return this load, and the loads that join it."""
        for queue in (self._demanded, self._ahead):
            at = 0
            while at < len(queue):
                load = queue[at]
                if load.begun >= load.parts:  # cut short
                    del queue[at]
                    self._unended -= load.cancelled and not load.running
                elif load.lane == lane and (load.begun or load.may_begin()):
                    loads = [load]
                    if load.begun + 1 == load.parts:
                        del queue[at]
                        while load.parts == 1 and queue and self._source.joins(loads, queue[0]):
                            loads.append(queue.popleft())
                    return self._begun(loads)
                else:
                    at += 1
        spare = self._spare(self.speed)
        if spare is None:
            return []
        self._unended += 1
        spare.aborts = self._aborts
        return self._begun([spare])

    def _begun(self, loads: list[Load]) -> list[Load]:
        for load in loads:
            load.begun += 1
            load.running += 1
        return loads


def _without(queue: deque[Load], load: Load) -> deque[Load]:
    return deque(one for one in queue if one is not load)
