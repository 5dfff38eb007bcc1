"""The embedding and head from disk give the bits of the table in memory, in a limited number of bytes."""

from pathlib import Path
from typing import get_args

import numpy as np
import pytest

from master.vocabulary import streamed
from master.vocabulary.streamed import RowTable, StreamedTable
from scheduler.storage.disk import DirectDisk
from scheduler.storage.extent import Extent, tile_starts
from tpi.config import Format
from tpi.devices.pages import PAGE, Bytes
from tpi.errors import KernelError, PlanError, WeightsError
from tpi.kernels import open_kernels
from tpi.pack.builder.quantise import assemble, encode_part
from tpi.pack.layout import Layout, Part, RunLayout

KERNELS = open_kernels()
HIDDEN, UNITS, WIDTH = 64, 40, 32
ROWS = [0, 1279, 31, 32, 33, 640, 640, 5]


def make_table(path: Path, format: Format, layout: Layout) -> tuple[RunLayout, Extent, np.ndarray]:
    run = RunLayout("row", layout, (Part("row", format, "row"),), WIDTH, HIDDEN, UNITS)
    values = np.random.default_rng(1).standard_normal((UNITS * WIDTH, HIDDEN)).astype(np.float32)
    data = assemble(run, {"row": encode_part(run.parts[0], run, values)}).reshape(-1)
    path.write_bytes(bytes(192) + data.tobytes())
    return run, Extent(path, 192, data.size), data


@pytest.mark.parametrize("format", get_args(Format))
def test_rows_and_logits_are_those_of_the_table_in_memory(tmp_path: Path, format: Format) -> None:
    layout: Layout = "record" if format in ("f32", "f16", "bf16") else "tiled"
    run, extent, data = make_table(tmp_path / "head.block", format, layout)
    x = np.random.default_rng(2).standard_normal((3, HIDDEN)).astype(np.float32)
    rows = KERNELS.gather(run, data, np.asarray(ROWS, np.int32))
    assert np.array_equal(RowTable(run, extent, KERNELS).gather(ROWS), rows)
    whole = KERNELS.logits(run, data, x)
    for budget in (2 * (run.unit_bytes + 3 * PAGE), extent.slot_bytes // 2, 2 * extent.slot_bytes):
        table = StreamedTable(run, extent, budget, KERNELS, DirectDisk(2 * PAGE, 2), tile=4 * PAGE)
        assert table.memory_bytes <= budget
        for _ in range(3):
            np.testing.assert_allclose(table.logits(x), whole, rtol=1e-5, atol=1e-5)
        assert np.array_equal(table.gather(ROWS), rows)
        table.close()


def test_tiles_cover_the_table_in_order(tmp_path: Path) -> None:
    run, extent, data = make_table(tmp_path / "head.block", "q8", "tiled")
    table = StreamedTable(run, extent, extent.slot_bytes // 3, KERNELS, tile=3 * PAGE)
    for _ in range(2):
        assert b"".join(tile.tobytes() for _, tile in table.tiles()) == data.tobytes()
        assert [start for start, _ in table.tiles()] == tile_starts(run, 3 * PAGE)
    assert table.take().read_bytes >= 2 * (extent.nbytes - table.memory_bytes)
    table.close()


class LateDisk(DirectDisk):
    """A disk that takes a second of the clock of `streamed` for every read."""

    now = 0.0

    def read(self, path: Path, offset: int, into: Bytes) -> int:
        self.now += 1.0
        return super().read(path, offset, into)


def test_what_a_step_waits_for_rows_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of the embedding are read when a step needs them, so nothing hides the wait."""
    disk = LateDisk(threads=1)
    monkeypatch.setattr(streamed, "perf_counter", lambda: disk.now)
    run, extent, _ = make_table(tmp_path / "head.block", "q8", "tiled")
    table = RowTable(run, extent, KERNELS, disk)
    table.gather(range(0, UNITS * WIDTH, WIDTH))  # a prompt
    for row in (0, 1, 5 * WIDTH):
        table.gather([row])
    assert table.waits == 1.0  # of a typical step
    assert table.take().stall_seconds == UNITS + 3
    assert table.take().stall_seconds == 0


def test_what_a_step_waits_for_tiles_is_known(tmp_path: Path) -> None:
    run, extent, _ = make_table(tmp_path / "head.block", "q8", "tiled")
    table = StreamedTable(run, extent, extent.slot_bytes // 3, KERNELS, tile=3 * PAGE)
    assert table.waits == 0
    for _ in range(3):
        table.logits(np.ones((1, HIDDEN), np.float32))
    taken = table.take()
    assert 0 < table.waits < taken.stall_seconds
    assert taken.read_bytes >= 2 * (extent.nbytes - table.memory_bytes)
    assert taken.ring_bytes
    table.close()


def test_what_is_wrong_is_named(tmp_path: Path) -> None:
    run, extent, _ = make_table(tmp_path / "head.block", "f32", "record")
    table = RowTable(run, extent, KERNELS)
    for row in (-1, UNITS * WIDTH):
        with pytest.raises(KernelError, match=r"outside 0\.\.1279"):
            table.gather([row])
    with pytest.raises(PlanError):
        StreamedTable(run, extent, 100, KERNELS)
    extent.path.unlink()
    with pytest.raises(WeightsError, match=r"head\.block"):
        table.gather([0])
    table.close()


def test_a_first_read_is_verified_and_repeated_if_wrong(tmp_path: Path) -> None:
    run, extent, data = make_table(tmp_path / "head.block", "f32", "record")
    first: list[int] = []

    def verify(unit: int, found: Bytes) -> None:
        start = unit * run.unit_bytes
        assert found.tobytes() == data[start : start + found.size].tobytes()
        first.append(unit)
        if first.count(unit) == 1 and unit:
            raise WeightsError("head.block does not match its hash")

    half, disk = extent.slot_bytes // 2, DirectDisk(2 * PAGE, 1)
    table = StreamedTable(run, extent, half, KERNELS, disk, tile=4 * PAGE, verify=verify)
    for _ in range(2):
        assert b"".join(tile.tobytes() for _, tile in table.tiles()) == data.tobytes()
    starts = tile_starts(run, 4 * PAGE)
    assert {unit: first.count(unit) for unit in starts} == {unit: 1 if unit == 0 else 2 for unit in starts}
    for _ in range(2):
        table.gather([0, 32 * starts[1]])
    table.close()
    assert (first.count(0), first.count(starts[1])) == (2, 3)


def test_tiles_begin_on_pages_where_they_are_large_enough() -> None:
    run = RunLayout("row", "record", (Part("row", "q4", "row"),), 32, 96, 100)
    starts = tile_starts(run, 20 * run.unit_bytes)
    assert all(start * run.unit_bytes % PAGE == 0 for start in starts) or starts[1] == 20
    assert tile_starts(run, 1) == list(range(100))
