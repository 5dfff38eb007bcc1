"""The slots of a demand cache and the loads into them, protected by one lock."""

import threading
import time
from collections.abc import Callable

import numpy as np

from scheduler.demand.loads import HintRecord, IdleTime, UnitLoad, Waiting
from scheduler.demand.policies import Policy
from scheduler.demand.sources import UnitTier
from scheduler.demand.stats import DemandStats
from scheduler.demand.workers import LoadWorkers
from scheduler.slots.table import F64, SlotTable, Units
from scheduler.window.stats import ReadClock
from tpi.devices.pages import Bytes
from tpi.errors import TpiError
from tpi.trace import NoTrace

Verify = Callable[[int, Bytes], None]
_WANTED_SOON = 2.0**100  # added to the worth of units that are expected and have not been used
_LOOK_AGAIN = 1.0  # seconds after which a waiting hold checks if its load can still happen


class Store:
    """The slots and loads of a cache. The arguments are those of `scheduler.demand.cache.DemandCache`."""

    def __init__(
        self,
        source: UnitTier,
        memory: Bytes,
        policy: Policy,
        workers: LoadWorkers,
        verify: Verify | None,
        reads: ReadClock | None,
        trace: NoTrace,
        idle: IdleTime,
    ) -> None:
        size = source.slot_bytes
        self.source, self.policy, self._workers, self._trace = source, policy, workers, trace
        self._slots = [memory[at : at + size] for at in range(0, memory.size - size + 1, size)] if size else []
        self.table = SlotTable(len(source.keys), len(self._slots))
        self.stats = DemandStats()
        self.lock = threading.Lock()
        self._done = threading.Condition(self.lock)
        self._waiting = Waiting(source.joins, source.nbytes)
        self._loads: dict[int, UnitLoad] = {}  # loads that are queued, running or failed; each unit has a slot
        self._unused = np.zeros(len(self._slots), np.bool_)  # True for slots that were filled ahead and not used since
        self._announced: dict[int, Units] = {}  # expected units by block
        self._wanted_soon = np.zeros(len(source.keys), np.bool_)  # True for these units
        self._demanded = 0  # number of loads that a hold waits for
        self._ahead_bytes = 0  # bytes that are being read ahead
        self.loaded_bytes = 0  # bytes that were loaded since the store was opened
        self._idle, self._reads, self._hints = idle, reads or ReadClock(), HintRecord()
        self._verify, self._unverified = verify, np.full(len(source.keys), verify is not None)
        self._closed = False
        workers.start(self._serve)

    def pin(self, units: Units, at_least: int) -> int:
        """Pin as many of `units` as there is room for and start loading them; return how many.

        If there is room for fewer than `at_least`, pin none.

        Raises:
            TpiError: if the cache is closed.
        """
        with self.lock:
            self._require_open()
            while (count := self.table.fitting(units)) < at_least and self.table.settling:
                self._done.wait(_LOOK_AGAIN)
                self._require_open()
            if count < at_least:
                return 0
            if count:
                self._admit(units[:count])
            return count

    def divide(self, units: Units, choose: Callable[[Units, Units], int]) -> tuple[Units, Units, Units]:
        """Pin those of `units` (of one block) that are loaded, and as many of the others as `choose` says.

        Return the units that are loaded, that are loading, and that are left out. Of the units that are not loaded,
        those that are already loading come first, then those with the highest worth. Errors are those of `pin`. For
        `choose`, see `scheduler.demand.shared.Choose`.
        """
        with self.lock:
            self._require_open()
            ready, coming, lacking = self._sorted(units)
            late = np.concatenate([coming, lacking[np.argsort(-self.policy.worth(lacking), kind="stable")]])
            room = self.table.fitting(np.concatenate([ready, late])) - len(ready)
            count = min(choose(ready, late), room) if len(late) else 0
            if len(units):
                self._admit(np.concatenate([ready, late[:count]]), units)
            left = late[count:]
            self.stats.elsewhere += len(left)
            self._read_ahead(lambda: self._waiting.announce_first(self.table.lacking(left).tolist()))
            return ready, late[:count], left

    def present(self, units: Units) -> tuple[Units, Units, Units]:
        """Pin those of `units` that are loaded, without counting uses; return the same as `divide`."""
        with self.lock:
            self._require_open()
            ready, coming, lacking = self._sorted(units)
            self.table.pin(ready)
            return ready, units[:0], np.concatenate([coming, lacking])

    def forget_counts(self) -> None:
        """Reset all counts to 0."""
        with self.lock:
            self.stats = DemandStats()

    def wait(self, unit: int) -> Bytes:
        """Return the bytes of a pinned unit when it is loaded; raise the error of its load if that failed."""
        began = 0.0
        with self.lock:
            while (load := self._loads.get(unit)) is not None:
                began = began or time.perf_counter()
                if load.error is not None:
                    raise load.error
                self._require_open()
                self._done.wait(_LOOK_AGAIN)
            if began:
                ended = time.perf_counter()
                self.stats.stall_seconds += ended - began
                self._trace.add("stall", self._name(unit), int(began * 1e9), int(ended * 1e9))
            return self.source.view(unit, self._slots[self.table.slot_of[unit]])

    def unpin(self, units: Units) -> None:
        """Remove one pin of each of `units`."""
        with self.lock:
            self.table.unpin(self.table.slot_of[units])
            self._forget_failed(units.tolist())

    def announce(self, block: int, units: Units) -> None:
        """Expect that the next hold of `block` is of `units`; read them ahead if there is time."""
        with self.lock:
            if self._closed:
                return
            self.policy.expect(units)
            self._mark(block, units)
            self._read_ahead(lambda: self._waiting.announce(self.table.lacking(units).tolist()))

    def close(self) -> None:
        """Begin no more loads; return when the running ones have ended. Idempotent."""
        with self.lock:
            self._closed = True
            self._done.notify_all()
        self._workers.close()

    # The methods below are called with the lock held.

    def _require_open(self) -> None:
        if self._closed or self._workers.lost:
            raise TpiError("the cache of weights is closed; open the model again")

    def _name(self, unit: int) -> str:
        block, own = self.source.keys[unit]
        return f"block {block}, unit {own}"

    def _mark(self, block: int, units: Units) -> None:
        """Mark `units` as expected, in place of the units of that block that were expected before."""
        self._wanted_soon[self._announced.pop(block, units)] = False
        self._wanted_soon[units] = True
        self._announced[block] = units

    def _worth(self, units: Units) -> F64:
        return self.policy.worth(units) + _WANTED_SOON * self._wanted_soon[units]

    def _sorted(self, units: Units) -> tuple[Units, Units, Units]:
        """Return the units that are loaded, that are loading, and that have no slot."""
        slots = self.table.slot_of[units] >= 0
        coming = slots & np.array([unit in self._loads for unit in units.tolist()], np.bool_)
        return units[slots & ~coming], units[coming], units[~slots]

    def _admit(self, units: Units, used: Units | None = None) -> None:
        """Pin `units` and start loading the missing ones. `used` are the units that are used, if these are more."""
        used = units if used is None else used
        self._mark(self.source.keys[used[0]][0], units[:0])
        pending = [unit for unit in units.tolist() if unit in self._loads]
        lacking = self.table.admit(units, self._worth)
        self.policy.use(used)
        wasted = int(np.count_nonzero(self._unused[self.table.slot_of[lacking]]))
        came_true = int(np.count_nonzero(self._unused[self.table.slot_of[units]])) - wasted
        self._judge(came_true, wasted)
        self._unused[self.table.slot_of[units]] = False
        misses = len({*lacking.tolist(), *pending})
        self.stats.misses += misses
        self.stats.hits += len(units) - misses
        self._demand(lacking.tolist())

    def _read_ahead(self, announce: Callable[[], None]) -> None:
        """Call `announce`, which queues units to read ahead, and wake as many workers as units were added."""
        before = self._waiting.ahead
        announce()
        self._workers.kick(max(0, self._waiting.ahead - before))

    def _demand(self, units: list[int]) -> None:
        """Start loading `units`, which have slots, before all other loads."""
        self._idle.asked(bool(units))
        self._begin(units, ahead=False)
        self._demanded += len(units)
        self._waiting.demand(units)
        self._workers.kick(len(units))

    def _begin(self, units: list[int], ahead: bool) -> None:
        for unit in units:
            self._loads[unit] = UnitLoad(unit, ahead)

    def _forget_failed(self, units: list[int]) -> None:
        """Forget the failed loads of those of `units` that have lost their slot, so that the next hold tries again."""
        for unit in units:
            load = self._loads.get(unit)
            if load is not None and load.error is not None and self.table.slot_of[unit] < 0:
                del self._loads[unit]

    # The methods below are called by the workers.

    def _serve(self) -> None:
        """Run the most urgent load, if there is one."""
        with self.lock:
            units = [] if self._closed else self._waiting.next_demanded() or self._next_ahead()
            slots = [self._slots[self.table.slot_of[unit]] for unit in units]
        if not units:
            return
        began, moved, error = time.perf_counter(), 0, None
        self._reads.begin_read()
        try:
            moved = self._fill(units, slots)
        except Exception as failure:  # noqa: BLE001 - the hold that waits for the unit raises it
            error = failure
        self._reads.end_read()
        with self.lock:
            self._trace.add("load", self._name(units[0]), int(began * 1e9), int(time.perf_counter() * 1e9))
            self.stats.read_bytes += moved
            self.loaded_bytes += moved
            for unit in units:
                self._finish(unit, error)
            self._done.notify_all()

    def _fill(self, units: list[int], slots: list[Bytes]) -> int:
        moved = self.source.fill(units, slots)
        for unit, slot in zip(units, slots, strict=True):
            if self._verify is not None and self._unverified[unit]:
                try:
                    self._verify(unit, self.source.view(unit, slot))
                except Exception:  # noqa: BLE001 - the read may have been at fault: read the unit once more
                    moved += self.source.fill([unit], [slot])
                    self._verify(unit, self.source.view(unit, slot))
                self._unverified[unit] = False
        return moved

    def _next_ahead(self) -> list[int]:
        """Return a unit to read ahead, placed in a slot, if there is time and a slot that is not in use; else []."""
        unit = self._waiting.next_ahead(lambda unit: self.table.slot_of[unit] >= 0)
        if unit is None:
            return []
        speed = self.loaded_bytes / (self._reads.seconds or 1.0)
        units, slots = self.table.gains(np.array([unit]), self._worth)
        able = len(units) and self._idle.room(speed, self._ahead_bytes) >= self.source.nbytes(unit)
        if not able or not self._hints.follows():
            self._waiting.forget_ahead()
            return []
        self._judge(0, int(self._unused[slots[0]]))
        self.table.place(units, slots)
        self._begin([unit], ahead=True)
        self._unused[slots] = True
        self.stats.ahead += 1
        self._ahead_bytes += self.source.nbytes(unit)
        return [unit]

    def _judge(self, used: int, wasted: int) -> None:
        self.stats.ahead_used += used
        self.stats.ahead_wasted += wasted
        self._hints.note(used, wasted)

    def _finish(self, unit: int, error: Exception | None) -> None:
        load, slots = self._loads[unit], self.table.slot_of[[unit]]
        if error is not None:
            self._unused[slots] = False
        self.table.end(slots, arrived=error is None)
        if load.ahead:
            self._ahead_bytes -= self.source.nbytes(unit)
        else:
            self._demanded -= 1
            if not self._demanded:
                self._idle.loaded()
        if error is None:
            del self._loads[unit]
        else:
            load.error = error
            self._forget_failed([unit])
