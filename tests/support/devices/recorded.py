"""Records on a disk whose reads fail, tear and end in an order that a seed draws, and checks of a tier on it."""

import errno
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from random import Random
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from scheduler.demand.records.layer import RecordLayer
from scheduler.demand.records.tier import RecordTier
from scheduler.slots.shelf import Load
from scheduler.slots.workers import Readers, Serve
from scheduler.storage.extent import Extent
from tests.support.disks import MemoryDisk
from tests.support.slots import table_faults
from tpi.devices.pages import PAGE, Bytes, page_buffer

T = TypeVar("T")
HEAD = 100  # bytes of a file before its records
AFTER = 77  # what lies behind the slots


class DrawnReaders(Readers):
    """Threads whose reads wait until all possible reads have begun, and then end one by one in a drawn order."""

    def __init__(self, count: int, seed: int) -> None:
        super().__init__(count)
        self._most = count
        self._random, self._gate = Random(seed), threading.Condition()
        self._due = 0  # pieces of work that are asked for and not over
        self._waiting: list[object] = []
        self._chosen: object = None

    def start(self, serve: Serve) -> None:
        def counted() -> None:
            serve()
            with self._gate:
                self._due -= 1
                self._choose()

        super().start(counted)

    def kick(self, loads: Sequence[Load | None]) -> None:
        with self._gate:
            self._due += len(loads)
        super().kick(loads)

    def in_turn(self, read: Callable[[], T]) -> T:
        """Return the result of `read`, called when its turn in the drawn order comes; one read runs at a time."""
        mine = object()
        with self._gate:
            self._waiting.append(mine)
            self._choose()
            self._gate.wait_for(lambda: self._chosen is mine)
            try:
                return read()
            finally:
                self._waiting.remove(mine)
                self._chosen = None
                self._choose()

    def _choose(self) -> None:
        if self._chosen is None and self._waiting and len(self._waiting) >= min(self._most, self._due):
            self._chosen = self._random.choice(self._waiting)
            self._gate.notify_all()


class DrawnDisk(MemoryDisk):
    """A disk for `DrawnReaders`; its reads tear, and fail on request."""

    def __init__(self, files: dict[Path, bytes], readers: DrawnReaders, threads: int) -> None:
        super().__init__(files, PAGE, threads)
        self.faults = self.reads = 0
        self.files, self._readers = files, readers

    def read(self, path: Path, offset: int, into: Bytes) -> int:
        into[: into.size // 2] = 255  # what a torn read leaves behind
        return self._readers.in_turn(lambda: self._read(path, offset, into))

    def _read(self, path: Path, offset: int, into: Bytes) -> int:
        self.reads += 1
        if self.faults:
            self.faults -= 1
            raise OSError(errno.EIO, "Input/output error")
        return super().read(path, offset, into)


def record(layer: int, neuron: int, size: int) -> bytes:
    """Return `size` bytes that differ between records and positions."""
    return ((np.arange(size) * 7 + layer * 31 + neuron * 113) % 251).astype(np.uint8).tobytes()


def files_of(layers: int, neurons: int, size: int) -> dict[Path, bytes]:
    """Return a file for each layer, with its records back to back behind a header."""
    return {
        _path(layer): bytes(HEAD) + b"".join(record(layer, neuron, size) for neuron in range(neurons))
        for layer in range(layers)
    }


def layers_of(layers: int, neurons: int, size: int, slots: int, random: np.random.Generator) -> list[RecordLayer]:
    """Return layers with random frequencies."""
    return [
        RecordLayer(f"ffn {layer}", Extent(_path(layer), HEAD, neurons * size), size, random.random(neurons), slots)
        for layer in range(layers)
    ]


def whole(tier: RecordTier, layer: int, neurons: npt.NDArray[np.int32], slots: npt.NDArray[np.int32]) -> bool:
    """Return True if `slots` have the records of `neurons`."""
    opened = tier.layers[layer]
    size = opened.layer.record_bytes
    return all(
        opened.records[slot].tobytes() == record(layer, neuron, size)
        for neuron, slot in zip(neurons.tolist(), slots.tolist(), strict=True)
    )


@contextmanager
def tier_of(
    seed: int, layers: int = 3, neurons: int = 48, size: int = 200, slots: int = 16, threads: int = 2, gap: int = 600
) -> Iterator[tuple[RecordTier, DrawnDisk, Bytes]]:
    """Yield a tier on a drawn disk; check that it stays within its memory and leaves no thread."""
    random = np.random.default_rng(seed)
    readers = DrawnReaders(threads, seed)
    disk = DrawnDisk(files_of(layers, neurons, size), readers, threads)
    given = layers_of(layers, neurons, size, slots, random)
    used, before = layers * slots * size, set(threading.enumerate())
    memory = page_buffer(used + 64)
    memory[used:] = AFTER
    with closing(RecordTier(given, disk, readers, threads, gap)) as tier:
        tier.attach(memory[:used])
        yield tier, disk, memory
        assert not any(table_faults(each.table) for each in tier.layers)
    assert (memory[used:] == AFTER).all()  # the slots are never exceeded
    assert set(threading.enumerate()) <= before


def _path(layer: int) -> Path:
    return Path(f"layer{layer}.shard")
