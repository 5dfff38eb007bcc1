"""Records on disks that fail, tear and end in any order, and what a tier of them should make of it."""

import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt

from scheduler.demand.records.layer import RecordLayer
from scheduler.demand.records.tier import RecordTier
from scheduler.demand.workers import Readers
from scheduler.storage.extent import Extent
from tests.support.devices.demanded import ShuffledDisk
from tpi.devices.pages import Bytes, page_buffer

HEAD = 100  # bytes of a file before its records
AFTER = 77  # what lies behind the slots


def record(layer: int, neuron: int, size: int) -> bytes:
    """Bytes that tell records and positions in them apart."""
    return ((np.arange(size) * 7 + layer * 31 + neuron * 113) % 251).astype(np.uint8).tobytes()


def files_of(layers: int, neurons: int, size: int) -> dict[Path, bytes]:
    """A file for each layer, its records back to back behind a header."""
    return {
        _path(layer): bytes(HEAD) + b"".join(record(layer, neuron, size) for neuron in range(neurons))
        for layer in range(layers)
    }


def layers_of(layers: int, neurons: int, size: int, slots: int, random: np.random.Generator) -> list[RecordLayer]:
    """Each with drawn frequencies."""
    return [
        RecordLayer(f"ffn {layer}", Extent(_path(layer), HEAD, neurons * size), size, random.random(neurons), slots)
        for layer in range(layers)
    ]


def whole(tier: RecordTier, layer: int, neurons: npt.NDArray[np.int32], slots: npt.NDArray[np.int32]) -> bool:
    """Whether these slots have these neurons' records."""
    opened = tier.layers[layer]
    size = opened.layer.record_bytes
    return all(
        opened.records[slot].tobytes() == record(layer, neuron, size)
        for neuron, slot in zip(neurons.tolist(), slots.tolist(), strict=True)
    )


@contextmanager
def tier_of(
    seed: int, layers: int = 3, neurons: int = 48, size: int = 200, slots: int = 16, threads: int = 2, gap: int = 600
) -> Iterator[tuple[RecordTier, ShuffledDisk, Bytes]]:
    """A tier over a shuffled disk, which keeps to its memory and leaves no thread."""
    random = np.random.default_rng(seed)
    disk = ShuffledDisk(files_of(layers, neurons, size), threads, seed)
    given = layers_of(layers, neurons, size, slots, random)
    used, before = layers * slots * size, threading.active_count()
    memory = page_buffer(used + 64)
    memory[used:] = AFTER
    with closing(RecordTier(given, disk, Readers(threads), threads, gap)) as tier:
        tier.lay(memory[:used])
        yield tier, disk, memory
        assert not any(each.table.faults() for each in tier.layers)
    assert (memory[used:] == AFTER).all()  # the slots are never exceeded
    assert threading.active_count() == before


def _path(layer: int) -> Path:
    return Path(f"layer{layer}.shard")
