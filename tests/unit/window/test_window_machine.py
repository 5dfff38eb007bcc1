"""The memory window under random holds, releases, jumps and disk failures, compared with the files."""

import errno
import threading
from contextlib import AbstractContextManager
from pathlib import Path
from unittest import mock

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from scheduler.model.placement import place, place_window
from scheduler.window.window import MemoryWindow
from tests.support.cluster.window_helpers import make_blocks
from tests.support.disks import MemoryDisk
from tpi.devices.pages import PAGE, Bytes, page_buffer
from tpi.errors import TpiError, WeightsError


class FaultyDisk(MemoryDisk):
    """A disk that fails the next reads on request, and yields to other threads during a read."""

    def __init__(self, files: dict[Path, bytes], chunk: int, threads: int) -> None:
        super().__init__(files, chunk, threads)
        self.faults = 0
        self.read_bytes = 0
        self._lock = threading.Lock()

    def read(self, path: Path, offset: int, into: Bytes) -> int:
        with self._lock:
            self.read_bytes += into.size
            if self.faults:
                self.faults -= 1
                raise OSError(errno.EIO, "Input/output error")
        into[: into.size // 2] = 255  # what a torn read leaves behind
        return super().read(path, offset, into)


class WindowMachine(RuleBasedStateMachine):
    @initialize(
        sizes=st.lists(st.integers(0, 6 * PAGE), min_size=1, max_size=9),
        share=st.floats(0.2, 1.1),
        threads=st.integers(1, 3),
        window=st.integers(0, 4),
        pages=st.integers(1, 3),
        faults=st.integers(0, 24),
    )
    def start(self, sizes: list[int], share: float, threads: int, window: int, pages: int, faults: int) -> None:
        files, extents = make_blocks(sizes)
        slots = [extent.slot_bytes for extent in extents]
        self.budget = max(int(sum(slots) * share), *slots, 0)
        self.placement = place_window(slots, window) if window else place(slots, self.budget)
        self.files, self.extents = files, extents
        self.disk = FaultyDisk(files, pages * PAGE, threads)
        self.disk.faults = faults  # loading starts at once: these are met by the blocks that stay
        self.taken = 0  # bytes of all buffers that were ever made
        self.counting = mock.patch("scheduler.window.loader.page_buffer", self._page_buffer)
        self.counting.start()
        self.threads_before = set(threading.enumerate())
        self.window = MemoryWindow(extents, self.placement, self.disk)
        self.windowed = bool(window)
        self.held: list[tuple[int, AbstractContextManager[Bytes], Bytes]] = []
        self.next = 0

    def _page_buffer(self, size: int) -> Bytes:
        self.taken += size
        return page_buffer(size)

    def _enter(self, block: int) -> None:
        hold = self.window.hold(block)
        try:
            data = hold.__enter__()
        except WeightsError as error:
            self._check(f"block{block}" in str(error))
        except TpiError:
            self._check(bool(self.held))  # it may be refused only for what is held
        else:
            self.held.append((block, hold, data))

    def _check(self, right: bool) -> None:
        assert right

    @rule()
    def hold_next(self) -> None:
        self._enter(self.next)
        self.next = (self.next + 1) % len(self.extents)

    @rule(number=st.integers(0, 1 << 20))
    def hold_any(self, number: int) -> None:
        self.next = number % len(self.extents)
        self.hold_next()

    # what is held depends on threads: rules and draws must not, or hypothesis cannot replay them

    @rule(number=st.integers(0, 1 << 20))
    def release(self, number: int) -> None:
        if self.held:
            self.held.pop(number % len(self.held))[1].__exit__(None, None, None)

    @rule()
    def whole_cycle(self) -> None:
        for block in range(len(self.extents)):
            while self.held:
                self.held.pop()[1].__exit__(None, None, None)
            self._enter(block)
            self.contents_are_whole()

    @rule(count=st.integers(1, 5))
    def fail_reads(self, count: int) -> None:
        self.disk.faults = count

    @invariant()
    def contents_are_whole(self) -> None:
        for block, _, data in getattr(self, "held", []):
            assert data.tobytes() == self.files[Path(f"block{block}.shard")][PAGE:]

    @invariant()
    def memory_is_what_was_planned_and_within_the_budget(self) -> None:
        if hasattr(self, "window"):
            assert self.taken == self.placement.memory_bytes
            assert self.windowed or self.taken <= self.budget

    def teardown(self) -> None:
        if hasattr(self, "window"):
            self.window.close()
            self.counting.stop()
            assert set(threading.enumerate()) <= self.threads_before


TestWindowMachine = WindowMachine.TestCase
TestWindowMachine.settings = settings(
    max_examples=200, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
