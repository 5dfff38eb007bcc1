"""Reading past the page cache: whole, short, missing and failing files; speed limits; a disk's remembered speed."""

import errno
import json
import os
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.storage import disk as disk_module
from scheduler.storage.disk import DirectDisk, Disk, read_chunk, read_extent
from scheduler.storage.extent import Extent
from scheduler.storage.tune import DiskSpeed, disk_for, known_speed, mark_doubted, measure_disk
from tests.support.disks import MemoryDisk, ThrottledDisk
from tpi.devices.pages import PAGE, Bytes, page_buffer
from tpi.errors import WeightsError

CONTENT = np.random.default_rng(0).integers(0, 256, 5 * PAGE + 1234, np.uint8).tobytes()


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("disk") / "block.shard"
    path.write_bytes(CONTENT)
    return path


@settings(max_examples=80, deadline=None)
@given(
    offset=st.integers(0, len(CONTENT)),
    nbytes=st.integers(0, len(CONTENT)),
    pages=st.integers(1, 3),
    kind=st.sampled_from(["direct", "buffered", "memory", "throttled"]),
)
def test_any_range_is_read_exactly(file: Path, offset: int, nbytes: int, pages: int, kind: str) -> None:
    disks: dict[str, Disk] = {
        "direct": DirectDisk(pages * PAGE, 1),
        "buffered": DirectDisk(pages * PAGE, 1, direct=False),
        "memory": MemoryDisk({file: CONTENT}, pages * PAGE),
        "throttled": ThrottledDisk(DirectDisk(pages * PAGE), 1e12),
    }
    extent = Extent(file, offset, min(nbytes, len(CONTENT) - offset))
    slot = page_buffer(extent.slot_bytes)
    assert not slot.size or slot.ctypes.data % PAGE == 0
    data = read_extent(disks[kind], extent, slot)
    assert data.tobytes() == CONTENT[offset : offset + extent.nbytes]


@pytest.mark.parametrize("direct", [True, False])
def test_a_short_file_is_refused_by_name(file: Path, direct: bool) -> None:
    extent = Extent(file, PAGE, len(CONTENT))
    with pytest.raises(WeightsError, match=r"block\.shard is shorter"):
        read_extent(DirectDisk(direct=direct), extent, page_buffer(extent.slot_bytes))


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("packs/llama/ab.safetensors", r"; remove the pack packs/llama; .*in the cache, else run `tpi pack`$"),
        ("shards/ab/neuron.0-4.shard", r"; remove it to fetch it again$"),
    ],
)
@pytest.mark.parametrize("content", [bytes(10), None])
def test_what_to_do_about_a_broken_file_depends_on_its_kind(name: str, advice: str, content: bytes | None) -> None:
    path = Path(name)
    disk = MemoryDisk({} if content is None else {path: content})
    with pytest.raises(WeightsError, match=advice):
        read_extent(disk, Extent(path, 0, 100), page_buffer(PAGE))


@pytest.mark.parametrize("direct", [True, False])
def test_a_missing_file_is_refused_by_name(tmp_path: Path, direct: bool) -> None:
    extent = Extent(tmp_path / "gone.shard", 0, 100)
    with pytest.raises(WeightsError, match=r"gone\.shard could not be read: No such file"):
        read_extent(DirectDisk(direct=direct), extent, page_buffer(extent.slot_bytes))


class Failing(MemoryDisk):
    """A disk whose first `faults` reads fail."""

    def __init__(self, faults: int, number: int = errno.EIO) -> None:
        super().__init__({Path("block.shard"): CONTENT})
        self.faults = faults
        self.number = number

    def read(self, path: Path, offset: int, into: Bytes) -> int:
        if self.faults:
            self.faults -= 1
            raise OSError(self.number, os.strerror(self.number))
        return super().read(path, offset, into)


def test_too_many_open_files_remove_nothing_that_was_read() -> None:
    with pytest.raises(WeightsError, match=r"Too many open files; raise the limit of open files \(ulimit -n\)$"):
        read_chunk(Failing(2, errno.EMFILE), Extent(Path("block.shard"), 0, 100), page_buffer(PAGE), 0)


def test_one_failure_is_retried_and_two_are_not() -> None:
    extent = Extent(Path("block.shard"), 0, 100)
    slot = page_buffer(PAGE)
    assert read_chunk(Failing(1), extent, slot, 0) == 100
    assert slot[:100].tobytes() == CONTENT[:100]
    with pytest.raises(WeightsError, match=r"block\.shard could not be read: Input/output error"):
        read_chunk(Failing(2), extent, slot, 0)


def test_without_direct_reads_files_are_read_through_the_cache(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = DirectDisk()
    monkeypatch.setattr("scheduler.storage.disk._DIRECT", 1 << 30)  # a flag that no file system knows
    monkeypatch.setattr("os.open", _refusing_open)
    extent = Extent(file, 0, len(CONTENT))
    assert read_extent(disk, extent, page_buffer(extent.slot_bytes)).tobytes() == CONTENT
    assert not disk.direct


@pytest.mark.parametrize("everywhere", [False, True])
def test_memory_mapped_by_a_driver_is_filled_by_the_kernel(
    file: Path, monkeypatch: pytest.MonkeyPatch, everywhere: bool
) -> None:
    """Other memory is still read into directly. Memory that cannot be written raises an error."""
    flags: list[int] = []

    def read(path: Path, offset: int, into: Bytes, flag: int) -> int:
        flags.append(flag)
        if everywhere or (flag and into[0] == 1):
            raise OSError(errno.EFAULT, "Bad address")
        return read_file(path, offset, into, 0)

    read_file = disk_module._read_file
    monkeypatch.setattr(disk_module, "_DIRECT", 1 << 14)
    monkeypatch.setattr(disk_module, "_read_file", read)
    disk, mapped, plain = DirectDisk(), page_buffer(PAGE), page_buffer(PAGE)
    mapped[0] = 1
    if everywhere:
        with pytest.raises(OSError, match="Bad address"):
            disk.read(file, 0, mapped)
        return
    for memory in (mapped, plain):
        assert disk.read(file, 0, memory) == min(PAGE, len(CONTENT))
    assert flags == [1 << 14, 0, 1 << 14]
    assert disk.direct


def _refusing_open(path: str, flags: int, mode: int = 0o777) -> int:
    import posix

    if flags & 1 << 30:
        raise OSError(errno.EINVAL, "Invalid argument")
    return posix.open(path, flags, mode)


def test_a_throttled_disk_keeps_its_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that only sleeping advances: reads in a row, and a read after an idle second."""
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr("tests.support.disks.time", SimpleNamespace(perf_counter=lambda: now, sleep=sleep))
    disk = ThrottledDisk(MemoryDisk({Path("block.shard"): bytes(1 << 20)}, PAGE), 4e6)
    extent = Extent(Path("block.shard"), 0, 400_000)
    slot = page_buffer(extent.slot_bytes)
    for _ in range(3):
        begun = now
        read_extent(disk, extent, slot)
        assert 0.1 <= now - begun == pytest.approx(extent.slot_bytes / 4e6)
        sleep(1.0)


def test_what_was_measured_is_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "big.shard"
    path.write_bytes(bytes(33 << 20))
    found = DiskSpeed(1 << 20, 2, 1e9)
    monkeypatch.setattr("scheduler.storage.tune.measure_disk", lambda extents: found)
    assert disk_for([path], tmp_path / "cache") == found
    monkeypatch.setattr("scheduler.storage.tune.measure_disk", lambda extents: pytest.fail("measured again"))
    assert disk_for([path], tmp_path / "cache") == found
    again = DiskSpeed(1 << 20, 4, 1e9)
    monkeypatch.setattr("scheduler.storage.tune.measure_disk", lambda extents: again)
    monkeypatch.setattr("scheduler.storage.tune._boot", lambda: "another")
    assert disk_for([path], tmp_path / "cache") == again
    assert len(json.loads((tmp_path / "cache" / "disks.json").read_text())) == 1


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Replace measurements; the list has the speeds that the next ones find."""
    found: list[float] = []
    monkeypatch.setattr("scheduler.storage.tune.measure_disk", lambda extents: DiskSpeed(1 << 20, 2, found.pop(0)))
    return found


def big(folder: Path) -> Path:
    """Return a file that is large enough to measure with."""
    path = folder / "big.shard"
    path.write_bytes(bytes(33 << 20))
    return path


def test_a_disk_that_a_run_contradicts_is_measured_again(tmp_path: Path, looks: list[float]) -> None:
    path, read = big(tmp_path), 1 << 30
    looks += [1e9, 2.5e8]
    first = disk_for([path], tmp_path)
    assert not first.contradicted_by(read, read / 0.8e9)  # as it reads beside computing
    assert not first.contradicted_by(1 << 20, 1.0)  # too little to tell
    assert first.contradicted_by(read, read / 0.3e9)
    assert first.contradicted_by(read, read / 2.5e9)
    mark_doubted([path], tmp_path)
    second = disk_for([path], tmp_path)
    assert second.bytes_per_second == 2.5e8
    assert second.contradicted_by(read, read / 1e9)
    assert not looks


def test_a_disk_that_was_confirmed_is_not_doubted_again(tmp_path: Path, looks: list[float]) -> None:
    path = big(tmp_path)
    looks += [1e9, 0.9e9]
    disk_for([path], tmp_path)
    mark_doubted([path], tmp_path)
    assert not disk_for([path], tmp_path).contradicted_by(1 << 30, 10.0)
    assert disk_for([path], tmp_path).bytes_per_second == 0.9e9


def test_what_is_remembered_of_a_disk_has_an_age(
    tmp_path: Path, looks: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, day = big(tmp_path), 24 * 3600
    looks += [1e9, 2e9]
    measured = disk_for([path], tmp_path)
    assert abs(measured.at - time.time()) < 60
    monkeypatch.setattr("scheduler.storage.tune.time.time", lambda: measured.at + 6 * day)
    assert disk_for([path], tmp_path) == measured
    monkeypatch.setattr("scheduler.storage.tune.time.time", lambda: measured.at + 8 * day)
    assert disk_for([path], tmp_path).bytes_per_second == 2e9


def test_each_device_of_a_testbed_has_its_own_speed_of_one_disk(
    tmp_path: Path, looks: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = big(tmp_path)
    looks += [2e9, 1e8, 2e8]
    found = [disk_for([path], tmp_path).bytes_per_second]
    for device in ("lap", "desk", "lap"):
        monkeypatch.setenv("TPI_TESTBED", "b0")
        monkeypatch.setenv("TPI_DEVICE", device)
        found.append(disk_for([path], tmp_path).bytes_per_second)
    monkeypatch.delenv("TPI_TESTBED")
    monkeypatch.delenv("TPI_DEVICE")
    found.append(known_speed(path, tmp_path))
    assert found == [2e9, 1e8, 2e8, 1e8, 2e9]


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "big.shard"
    path.write_bytes(bytes(33 << 20))
    found = DiskSpeed(1 << 20, 2, 1e9)
    monkeypatch.setattr("scheduler.storage.tune.measure_disk", lambda extents: found)
    assert disk_for([path], path / "no folder") == found


def test_a_damaged_record_and_little_to_read_give_the_defaults(tmp_path: Path) -> None:
    (tmp_path / "disks.json").write_text("[1, 2")
    path = tmp_path / "small.shard"
    path.write_bytes(CONTENT)
    assert disk_for([path], tmp_path) == DiskSpeed()
    assert disk_for([tmp_path / "gone"], tmp_path) == DiskSpeed()


def test_the_most_in_flight_among_equals_then_the_largest_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    speeds = {(1 << 20, 4): 960e6, (1 << 20, 8): 1000e6, (4 << 20, 4): 950e6, (4 << 20, 8): 990e6}
    monkeypatch.setattr(
        "scheduler.storage.tune.measure_reads", lambda extents, disk: speeds.get((disk.chunk, disk.threads), 0.0)
    )
    assert measure_disk([]) == DiskSpeed(4 << 20, 8, 990e6)


def test_a_block_is_read_in_a_part_for_each_thread_unless_small() -> None:
    def ways(speed: DiskSpeed, *blocks: int) -> list[tuple[int, int]]:
        return [(disk.chunk, disk.threads) for disk in map(speed.open, blocks)]

    assert ways(DiskSpeed(16 << 20, 4), 1 << 30, 33 << 20, 12 << 20) == [(16 << 20, 4), (33 << 18, 4), (3 << 20, 4)]
    assert ways(DiskSpeed(16 << 20, 8), 8_000_000, 1_000_000) == [(2_002_944, 4), (256 << 10, 4)]
    assert ways(DiskSpeed(16 << 20, 8), 32 << 20, 24 << 20) == [(4 << 20, 8), (4 << 20, 6)]
    assert ways(DiskSpeed(1 << 20, 4), 33 << 20) == [(1 << 20, 4)]


def test_a_real_measurement_is_a_speed(tmp_path: Path) -> None:
    path = tmp_path / "big.shard"
    path.write_bytes(bytes(8 << 20))
    assert measure_disk([Extent(path, 0, 8 << 20)]).bytes_per_second > 1e6
