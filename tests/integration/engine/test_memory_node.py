"""A node that streams weights: its reports while it loads, and the effect of a failing disk on steps."""

import errno
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from master.generation.engine import Engine
from master.vocabulary.sampler import Sampler, Sampling
from scheduler.storage.disk import DirectDisk
from scheduler.storage.tune import DiskSpeed
from tests.support.cluster.single import Setting, single_node
from tests.support.generating import generate
from tpi.devices.pages import PAGE, Bytes, page_buffer
from tpi.errors import WeightsError
from tpi.pack.reader import Pack

PROMPT = [5, 6, 7, 8]
WINDOW = Setting(window=1)


class Disk(DirectDisk):
    """A disk that fails on request."""

    def __init__(self) -> None:
        super().__init__(chunk=4 * PAGE, threads=2)
        self.broken = False
        self.lock = threading.Lock()
        self.read_bytes = 0

    def read(self, path: Path, offset: int, into: Bytes) -> int:
        if self.broken:
            raise OSError(errno.EIO, "Input/output error")
        with self.lock:
            self.read_bytes += into.size
        return super().read(path, offset, into)


def tokens(engine: Engine, count: int = 6) -> list[int]:
    sequence = engine.admit(PROMPT)
    made = [one.token for one in generate(engine, sequence, Sampler(Sampling(temperature=0)), count)]
    engine.release(sequence)
    return made


def test_a_failing_disk_fails_the_step_and_the_next_one_works(tiny_pack: Callable[..., Pack], tmp_path: Path) -> None:
    pack = tiny_pack("llama")
    with single_node(pack, Setting(), cache=tmp_path) as (engine, _):
        expected = tokens(engine)
    disk = Disk()
    with single_node(pack, WINDOW, disk, tmp_path) as (engine, node):
        assert tokens(engine) == expected
        disk.broken = True
        with pytest.raises(WeightsError, match=r"\.safetensors could not be read: Input/output error") as raised:
            tokens(engine)
        assert str(pack.path) in str(raised.value)
        disk.broken = False
        assert tokens(engine) == expected
        steady = node.steady()
        assert steady is not None
        assert (steady.least_memory == 0) == (steady.steady or steady.window > 0)


@pytest.mark.parametrize(("remembered", "odd"), [(1.0, True), (1e15, True), (0.0, False)])
def test_a_disk_slower_than_remembered_is_doubted_at_the_end(
    tiny_pack: Callable[..., Pack], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, remembered: float, odd: bool
) -> None:
    """The remembered bytes per second are unreachable; 0 means that the disk was never measured."""
    doubted = list[object]()
    speed = DiskSpeed(4 * PAGE, 2, remembered)
    monkeypatch.setattr("scheduler.storage.tune._LEAST_RUN", 1)
    monkeypatch.setattr("worker.plan.case.disk_for", lambda files, cache: speed)
    monkeypatch.setattr("worker.plan.residence.mark_doubted", lambda files, cache: doubted.append(files))
    with single_node(tiny_pack("llama"), WINDOW, cache=tmp_path) as (engine, _):
        tokens(engine)
    assert bool(doubted) is odd


def test_loading_is_progress(tiny_pack: Callable[..., Pack], tmp_path: Path) -> None:
    disk = Disk()
    with single_node(tiny_pack("llama"), WINDOW, disk, tmp_path) as (engine, node):
        tokens(engine)
        assert node.progress >= node.loop.progress + disk.read_bytes // 2 > node.loop.progress
        assert node.figures().planned_bytes == node.budget.used


def test_blocks_that_stay_are_reported_one_by_one(tiny_pack: Callable[..., Pack], tmp_path: Path) -> None:
    heard: list[tuple[int, int]] = []
    pack = tiny_pack("llama")
    blocks = 2 * pack.config.layers
    with single_node(pack, Setting(), cache=tmp_path, progress=lambda done, total: heard.append((done, total))):
        assert heard == [(done, blocks) for done in range(1, blocks + 1)]


def test_loading_can_be_given_up(tiny_pack: Callable[..., Pack], tmp_path: Path) -> None:
    def give_up(done: int, total: int) -> None:
        raise KeyboardInterrupt

    before = set(threading.enumerate())
    node = single_node(tiny_pack("llama"), Setting(), cache=tmp_path, progress=give_up)
    with pytest.raises(KeyboardInterrupt), node:
        pass
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("size", [0, 1, PAGE, 5 * PAGE, (2 << 20) - 1, 2 << 20, (5 << 20) + 1])
def test_buffers_are_pages_of_zeros(size: int) -> None:
    buffer = page_buffer(size)
    assert buffer.size == -(-size // PAGE) * PAGE
    assert not buffer.any()
    assert not size or buffer.ctypes.data % PAGE == 0
    buffer[:] = 1
    assert np.all(buffer == 1)
