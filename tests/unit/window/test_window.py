"""Holding blocks: contents, budgets, failures, counts, and a clean close."""

import gc
import threading
from itertools import pairwise
from pathlib import Path
from weakref import ReferenceType, ref

import pytest

from scheduler.model.placement import place, place_window
from scheduler.storage.disk import DirectDisk
from scheduler.window.stats import WindowPosition
from scheduler.window.window import Extent, MemoryWindow, Resident, Window
from tests.support.cluster.window_helpers import CountingDisk, content, make_blocks
from tpi.devices.pages import PAGE, Bytes, page_buffer
from tpi.errors import PlanError, TpiError, WeightsError
from tpi.trace import Trace

SIZES = [3 * PAGE - 100, 8 * PAGE + 7] * 4
SLOTS = [3 * PAGE, 9 * PAGE] * 4


def assert_token_whole(window: Window, sizes: list[int]) -> None:
    for block, size in enumerate(sizes):
        with window.hold(block) as data:
            assert data.tobytes() == content(block, size)


@pytest.mark.parametrize("pages", [9, 12, 13, 20, 30, 40, 47, 48, 1000])
def test_every_block_is_whole_at_every_budget(pages: int) -> None:
    files, extents = make_blocks(SIZES)
    window = MemoryWindow(extents, pages * PAGE, CountingDisk(files, 2 * PAGE))
    for _ in range(4):
        assert_token_whole(window, SIZES)
    assert window.placement.memory_bytes <= pages * PAGE
    window.close()


@pytest.mark.parametrize(("window_blocks", "retain"), [(1, 0), (2, 0), (3, 0), (4, 2), (2, 1), (99, 0)])
def test_the_papers_window_and_retention(window_blocks: int, retain: int) -> None:
    files, extents = make_blocks(SIZES)
    placement = place_window(SLOTS, window_blocks, retain)
    window = MemoryWindow(extents, placement, CountingDisk(files))
    assert_token_whole(window, SIZES)
    assert_token_whole(window, SIZES)
    window.close()
    assert placement.ring.depth >= min(window_blocks, len(set(placement.ring.blocks)))
    kept = {1, 3, 5, 7} if retain == 1 else {3, 7} if retain == 2 else set()
    assert placement.resident == (kept if window_blocks < 8 else set(range(8)))


@pytest.mark.parametrize("pages", [12, 20, 30])
def test_its_position_slides_once_through_all_that_streams(pages: int) -> None:
    files, extents = make_blocks(SIZES)
    window = MemoryWindow(extents, pages * PAGE, CountingDisk(files))
    streamed = len(SIZES) - len(window.placement.resident)
    assert window.position().blocks == streamed > 0
    passed: list[int] = []
    for _ in range(2):
        for block in range(len(SIZES)):
            with window.hold(block):
                now = window.position()
            assert 0 <= now.ready <= now.blocks == streamed
            passed += [now.following] * (now.following not in passed[-1:])
    assert passed[-2 * streamed :] == [(number + 1) % streamed for number in range(2 * streamed)]
    window.close()


def test_where_everything_stays_nothing_slides() -> None:
    files, extents = make_blocks(SIZES)
    for window in (Resident(extents, CountingDisk(files)), MemoryWindow(extents, 1000 * PAGE, CountingDisk(files))):
        assert_token_whole(window, SIZES)
        assert window.position() == WindowPosition()
        window.close()


def test_real_files_and_parts_of_files(tmp_path: Path) -> None:
    path = tmp_path / "pack.safetensors"
    body = content(5, 100_000)
    path.write_bytes(body)
    extents = [Extent(path, at, 9_973) for at in range(0, 90_000, 9_973)]
    for window in (
        Resident(extents),
        MemoryWindow(extents, 50_000, DirectDisk(PAGE, 3)),
        MemoryWindow(extents, 50_000, DirectDisk(PAGE, 2, direct=False)),
    ):
        for _ in range(3):
            for extent, block in zip(extents, range(len(extents)), strict=True):
                with window.hold(block) as data:
                    assert data.tobytes() == body[extent.offset : extent.offset + extent.nbytes]
        window.close()


def test_too_small_a_budget_says_what_would_do() -> None:
    with pytest.raises(PlanError, match=f"{9 * PAGE} bytes would do"):
        place(SLOTS, 9 * PAGE - 1)


def test_loads_run_ahead_across_the_end_of_a_token() -> None:
    files, extents = make_blocks(SIZES)
    disk = CountingDisk(files)
    window = MemoryWindow(extents, place_window(SLOTS, 2), disk)
    assert_token_whole(window, SIZES)
    assert disk.wait_for("block1", 2)  # of the next token
    assert disk.reads["block2"] == 1  # for which the ring has no room yet
    window.close()


def test_memory_is_never_allocated_again() -> None:
    files, extents = make_blocks(SIZES)
    window = MemoryWindow(extents, place_window(SLOTS, 3), CountingDisk(files))
    places: set[tuple[int, int]] = set()
    seen = []
    for _ in range(6):
        for block in range(len(SIZES)):
            with window.hold(block) as data:
                places.add((block, data.ctypes.data))
        seen.append(len(places))
    window.close()
    assert seen[2] == seen[-1]
    addresses = [address for _, address in places]
    assert max(addresses) - min(addresses) < window.placement.ring.size


def test_a_missing_file_is_raised_by_hold_and_tried_again() -> None:
    files, extents = make_blocks(SIZES)
    gone = files.pop(Path("block3.shard"))
    for placement in (place_window(SLOTS, 2), place(SLOTS, 1 << 30)):
        window = MemoryWindow(extents, placement, CountingDisk(files))
        with window.hold(2):
            pass
        with pytest.raises(WeightsError, match=r"block3\.shard could not be read: No such file"), window.hold(3):
            pass
        files[Path("block3.shard")] = gone
        with window.hold(3) as data:
            assert data.tobytes() == content(3, SIZES[3])
        assert_token_whole(window, SIZES)
        window.close()
        del files[Path("block3.shard")]


@pytest.mark.parametrize("threads", [1, 3])
def test_a_block_that_stays_is_read_once_more_after_a_failure(threads: int) -> None:
    files, extents = make_blocks([3 * PAGE])
    gone = files.pop(Path("block0.shard"))
    disk = CountingDisk(files, chunk=PAGE, threads=threads)
    window = MemoryWindow(extents, place([3 * PAGE], 1 << 20), disk)
    with pytest.raises(WeightsError, match=r"block0\.shard could not be read"), window.hold(0):
        pass
    files[Path("block0.shard")] = gone
    with window.hold(0) as data:
        assert data.tobytes() == content(0, 3 * PAGE)
    assert not disk.wait_for("block0", 4, seconds=0.2)
    window.close()


def test_an_aborted_step_starts_again_at_the_first_block() -> None:
    files, extents = make_blocks(SIZES)
    window = MemoryWindow(extents, place_window(SLOTS, 2), CountingDisk(files))
    for block in (0, 1, 2):
        with window.hold(block):
            pass
    assert_token_whole(window, SIZES)
    assert_token_whole(window, SIZES)
    window.close()


def test_each_block_is_verified_once_and_reread_if_wrong() -> None:
    files, extents = make_blocks(SIZES)
    calls: list[int] = []
    lock = threading.Lock()

    def verify(block: int, data: Bytes) -> None:
        with lock:
            calls.append(block)
            first = calls.count(block) == 1
        if block == 2 or (block == 4 and first):
            raise WeightsError(f"block{block}.shard does not match its hash")

    window = MemoryWindow(extents, place_window(SLOTS, 2), CountingDisk(files), verify)
    with window.hold(1):
        pass
    with pytest.raises(WeightsError, match=r"block2\.shard does not match its hash"), window.hold(2):
        pass
    for block in (3, 4, 5, 6, 7, 0, 1):
        with window.hold(block) as data:
            assert data.tobytes() == content(block, SIZES[block])
    window.close()
    assert [calls.count(block) for block in (0, 1, 3, 4, 5)] == [1, 1, 1, 2, 1]
    assert calls.count(2) >= 2


def test_a_crash_in_the_background_surfaces_in_hold() -> None:
    files, extents = make_blocks(SIZES)

    def verify(block: int, data: Bytes) -> None:
        raise ZeroDivisionError

    window = MemoryWindow(extents, place_window(SLOTS, 2), CountingDisk(files), verify)
    with pytest.raises(ZeroDivisionError), window.hold(0):
        pass
    window.close()


def test_a_nested_hold_that_can_never_be_served_is_refused() -> None:
    files, extents = make_blocks(SIZES)
    window = MemoryWindow(extents, place_window(SLOTS, 2), CountingDisk(files))
    with window.hold(0) as zero, window.hold(1) as one, window.hold(0) as again:
        assert again is zero
        with pytest.raises(TpiError, match="block 2 cannot be held yet"), window.hold(2):
            pass
        assert one.tobytes() == content(1, SIZES[1])
    assert_token_whole(window, SIZES)
    window.close()


def test_close_joins_every_thread_and_ends_a_waiting_hold() -> None:
    files, extents = make_blocks(SIZES)
    before = set(threading.enumerate())
    waiting = threading.Event()

    class Stuck(CountingDisk):
        def read(self, path: Path, offset: int, into: Bytes) -> int:
            waiting.wait()
            return super().read(path, offset, into)

    window = MemoryWindow(extents, place_window(SLOTS, 2), Stuck(files))
    ends: list[str] = []

    def hold() -> None:
        try:
            with window.hold(0):
                pass
        except TpiError as error:
            ends.append(str(error))

    holder = threading.Thread(target=hold)
    holder.start()
    closer = threading.Thread(target=window.close)
    closer.start()
    holder.join()
    waiting.set()
    closer.join()
    window.close()
    assert ends == ["the memory of weights is closed; open the model again"]
    assert set(threading.enumerate()) <= before


def test_a_closed_window_gives_its_memory_back_at_once() -> None:
    """Memory is free without garbage collection, because `--memory` has no room for two windows."""
    files, extents = make_blocks(SIZES)
    taken: list[ReferenceType[Bytes]] = []

    def allocate(nbytes: int) -> Bytes:
        memory = page_buffer(nbytes)
        taken.append(ref(memory))
        return memory

    gc.disable()
    try:
        window = MemoryWindow(extents, 20 * PAGE, CountingDisk(files), memory=allocate)
        assert_token_whole(window, SIZES)
        window.close()
        del window
        assert taken
        assert not any(memory() is not None for memory in taken)
    finally:
        gc.enable()


def test_what_is_counted_adds_up() -> None:
    files, extents = make_blocks(SIZES)
    trace = Trace()
    window = MemoryWindow(extents, place_window(SLOTS, 2, retain=2), CountingDisk(files), trace=trace)
    seen: list[tuple[int, int]] = []
    window.fill(lambda done, total: seen.append((done, total)))
    assert seen == [(1, 2), (2, 2)]
    assert window.progress > 0
    assert_token_whole(window, SIZES)
    window.take()
    for _ in range(10):
        assert_token_whole(window, SIZES)
    costs = window.costs()
    stats = window.take()
    assert stats.holds == 80
    assert stats.resident_bytes == 2 * 9 * PAGE
    assert stats.ring_bytes == window.placement.ring.size
    assert stats.read_bytes == pytest.approx(10 * window.placement.streamed_bytes, abs=12 * PAGE)
    assert stats.read_seconds > 0
    assert len(costs.compute) == 8
    assert min(costs.compute) > 0
    history = window.history()
    assert {len(one.compute) for one in history} == {len(one.load) for one in history} == {8}
    assert all(min(one.compute) > 0 for one in history)
    assert (stats + stats).holds == 160
    assert window.take().holds == 0
    window.close()
    assert {kind for kind, *_ in trace.rows} <= {"load", "stall"}
    loads = sorted((begin, end) for kind, _, begin, end in trace.rows if kind == "load")
    assert all(first[1] <= second[0] for first, second in pairwise(loads))


def test_a_node_that_has_nothing_of_a_block() -> None:
    sizes = [0, 5 * PAGE, 0, 6 * PAGE, 0, 5 * PAGE]
    files, extents = make_blocks(sizes)
    for placement in (place_window([e.slot_bytes for e in extents], 1), 11 * PAGE, 100 * PAGE):
        window = MemoryWindow(extents, placement, CountingDisk(files))
        assert_token_whole(window, sizes)
        assert_token_whole(window, sizes)
        window.close()


class AskedDisk(CountingDisk):
    """A disk with one reader that reads once for each wait that begins."""

    def __init__(self, files: dict[Path, bytes], chunk: int) -> None:
        super().__init__(files, chunk, threads=1)
        self.asked = threading.Semaphore(0)

    def read(self, path: Path, offset: int, into: Bytes) -> int:
        self.asked.acquire()
        return super().read(path, offset, into)


@pytest.mark.parametrize(("least", "parts"), [(1, 5), (3 * PAGE, 3), (4 * PAGE, 3), (5 * PAGE, 2), (99 * PAGE, 1)])
def test_a_followed_block_comes_in_parts_of_the_wanted_size(
    least: int, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The block is read in five parts of two pages, the last part of one page."""
    sizes = [9 * PAGE, 9 * PAGE]
    files, extents = make_blocks(sizes)
    disk = AskedDisk(files, 2 * PAGE)
    window = MemoryWindow(extents, place_window([9 * PAGE] * 2, 1, 0), disk)
    waiting = window._loader._slots._done
    wait = waiting.wait

    def asking(timeout: float | None = None) -> bool:
        disk.asked.release()
        return wait(timeout)

    monkeypatch.setattr(waiting, "wait", asking)
    found = [part.tobytes() for part in window.follow(0, least)]
    assert b"".join(found) == content(0, sizes[0])
    assert len(found) == parts
    assert all(len(part) >= least for part in found[:-1])
    disk.asked.release(99)
    window.close()
