"""Transfers of weights, keys and values in 200 drawn timings: computations always use the right data."""

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from itertools import pairwise
from random import Random
from threading import Lock

import numpy as np
import numpy.typing as npt
import pytest

from scheduler.model.placement import place, place_window
from scheduler.model.ring import smallest
from scheduler.transfer.merge import merge_rings
from scheduler.transfer.pages import PageBuffer, StagedPages
from scheduler.transfer.queue import TransferQueue
from scheduler.transfer.ring import DeviceRing, RingPart, RingSegment
from tests.support.devices.shuffled import Shuffled
from tests.support.kernels.kernel_cases import native
from tpi.devices.base import Pending
from tpi.devices.pages import PAGE, Bytes
from tpi.kernels.kv import KvPages
from tpi.kernels.spec import PAGE_TOKENS, Batch

SEEDS = range(200)
SEGMENTS, POOL = 7, 6
F32 = npt.NDArray[np.float32]


@contextmanager
def ring_of(seed: int, device: Shuffled, queue: TransferQueue) -> Iterator[tuple[DeviceRing, list[Bytes]]]:
    """Yield a ring of drawn depth over segments of some pages, and the bytes of each segment: its number."""
    random = Random(seed)
    sizes = [PAGE * random.randint(1, 4) for _ in range(SEGMENTS)]
    weights = [np.full(size, number + 1, np.uint8) for number, size in enumerate(sizes)]
    depth = random.randint(1, 3)
    ring = place_window(sizes, depth).ring if depth < 3 else place(sizes, sum(sizes) - min(sizes)).ring
    memory = device.memory.allocate(ring.size)
    contents = {
        number: RingSegment(f"segment {number}", sizes[number], partial(fill, device, weights[number]))
        for number in sorted(set(ring.blocks))
    }
    found = DeviceRing([RingPart(device, memory)], ring, contents, queue)
    found.resume()
    yield found, weights
    device.memory.free(memory)


def fill(device: Shuffled, data: Bytes, slot: Bytes) -> None:
    device.copy(data, slot).wait()


@pytest.mark.parametrize("seeds", [SEEDS[at : at + 20] for at in range(0, len(SEEDS), 20)], ids=str)
def test_nothing_computes_with_a_segment_that_is_half_there(seeds: range) -> None:
    for seed in seeds:
        with ExitStack() as stack:
            device = stack.enter_context(Shuffled(native, seed))
            queue = stack.enter_context(closing(TransferQueue()))
            ring, weights = stack.enter_context(ring_of(seed, device, queue))
            streamed = sorted(ring.shelf._contents)
            pending: list[tuple[int, Pending[Bytes]]] = []
            for _ in range(3):
                for number in streamed:
                    with ring.hold(number) as data:
                        pending.append((number, device.start(data.copy)))
            for number, result in pending:
                np.testing.assert_array_equal(result.wait(), weights[number])
            ring.wait_idle()


@pytest.mark.parametrize("seed", range(60))
def test_two_rings_in_one_place_take_turns(seed: int) -> None:
    """Let two rings use the same memory in turn: each drops what it has loaded ahead when the other begins.

    Neither may use the other's bytes.
    """
    random = Random(seed)
    with Shuffled(native, seed) as device, closing(TransferQueue()) as queue:
        sizes = [PAGE * random.randint(1, 4) for _ in range(SEGMENTS)]
        weights = [np.full(size, number + 1, np.uint8) for number, size in enumerate(sizes)]
        contents = {
            number: RingSegment(f"segment {number}", sizes[number], partial(fill, device, weights[number]))
            for number in range(SEGMENTS)
        }
        chosen = [sorted(random.sample(range(SEGMENTS), random.randint(1, SEGMENTS))) for _ in range(2)]
        layouts = [smallest(segments, sizes, random.randint(1, 3)) for segments in chosen]
        memory = device.memory.allocate(max(layout.size for layout in layouts))
        rings = [DeviceRing([RingPart(device, memory)], layout, contents, queue) for layout in layouts]
        pending: list[tuple[int, Pending[Bytes]]] = []
        for turn in range(6):
            number = turn % 2 if random.random() < 0.7 else 0
            rings[number].resume()
            for segment in chosen[number]:
                with rings[number].hold(segment) as data:
                    pending.append((segment, device.start(data.copy)))
            rings[number].pause()
        for segment, result in pending:
            np.testing.assert_array_equal(result.wait(), weights[segment])
        device.memory.free(memory)


@pytest.mark.parametrize("seeds", [SEEDS[at : at + 20] for at in range(0, 100, 20)], ids=str)
def test_two_cards_take_from_one_reader_in_the_order_of_use(seeds: range) -> None:
    """Streamed segments are read in the order of use, whichever card is ahead, also after an aborted step."""
    for seed in seeds:
        random = Random(seed)
        sizes = [PAGE * random.randint(1, 4) for _ in range(SEGMENTS)]
        cards = [random.randint(0, 1) for _ in sizes]
        reader = Reader()
        with ExitStack() as stack:
            devices = [stack.enter_context(Shuffled(native, 2 * seed + card)) for card in range(2)]
            queue = stack.enter_context(closing(TransferQueue(links=2)))
            parts, ring = ring_of_two(devices, queue, cards, sizes, random.randint(1, 3), reader)
            for _ in range(4):
                count = random.randint(1, SEGMENTS - 1) if random.random() < 0.3 else SEGMENTS
                pending = []
                for number in range(count):
                    with ring.hold(number) as data:
                        pending.append(devices[cards[number]].start(data.copy))
                for number, result in enumerate(pending):
                    np.testing.assert_array_equal(result.wait(), np.full(sizes[number], number + 1, np.uint8))
                if count < SEGMENTS:
                    ring.abandon()
                    reader.taken.append(-1)
            ring.pause()
            for part in parts:
                part.device.memory.free(part.memory)
        assert not reader.met
        pairs = [pair for pair in pairwise(reader.taken) if -1 not in pair]
        assert pairs
        assert all((after - before) % SEGMENTS == 1 for before, after in pairs)


class Reader:
    """A tier below with one reader; records its requests, and whether two came at once."""

    def __init__(self) -> None:
        self.taken: list[int] = []
        self.met = False
        self._busy = Lock()

    def feed(self, device: Shuffled, number: int, data: Bytes, slot: Bytes) -> None:
        self.met |= not self._busy.acquire(blocking=False)
        self.taken.append(number)
        device.copy(data, slot).wait()
        self._busy.release()


def ring_of_two(
    devices: list[Shuffled], queue: TransferQueue, cards: list[int], sizes: list[int], depth: int, reader: Reader
) -> tuple[list[RingPart], DeviceRing]:
    mine = [[number for number, card in enumerate(cards) if card == at] for at in range(2)]
    rings = [smallest(segments, sizes, depth) for segments in mine]
    parts = [RingPart(device, device.memory.allocate(ring.size)) for device, ring in zip(devices, rings, strict=True)]
    weights = [np.full(size, number + 1, np.uint8) for number, size in enumerate(sizes)]
    contents = {
        number: RingSegment(
            f"segment {number}", size, partial(reader.feed, devices[card], number, weights[number]), card, in_turn=True
        )
        for number, (size, card) in enumerate(zip(sizes, cards, strict=True))
    }
    found = DeviceRing(parts, merge_rings(rings, sizes), contents, queue)
    found.resume()
    return parts, found


@pytest.mark.parametrize("seeds", [SEEDS[at : at + 20] for at in range(0, len(SEEDS), 20)], ids=str)
def test_no_load_of_keys_and_values_overtakes_a_save_of_them(seeds: range) -> None:
    """Steps append a number to every sequence. In every layer, attention must read all numbers appended before."""
    for seed in seeds:
        random = Random(seed)
        with Shuffled(native, seed) as device, closing(TransferQueue()) as queue:
            layers = range(random.randint(1, 4))
            home, pages = kept_pages(device, queue, layers, stages=random.randint(1, 2))
            shown = {sequence: [] for sequence in range(2)}  # type: dict[int, list[int]]
            for step in range(6):
                pages.begin()
                batch = batch_of(shown, random)
                seen = [attended(device, pages, layer, batch, step) for layer in layers]
                for layer, result in enumerate(seen):
                    for sequence, found in result.wait().items():
                        assert found == shown[sequence], f"layer {layer}, step {step}"
                for sequence, count in zip(*np.unique(batch.sequence, return_counts=True), strict=True):
                    shown[int(sequence)] += [step + 1] * int(count)
            pages.flush()
            for layer in layers:
                for sequence, expected in shown.items():
                    assert stored(home.keys[layer], table(sequence), len(expected)) == expected


def kept_pages(device: Shuffled, queue: TransferQueue, layers: range, stages: int) -> tuple[KvPages, StagedPages]:
    home = KvPages.allocate(layers, POOL, 1, 1, "f32")
    room = KvPages.allocate(range(stages), POOL, 1, 1, "f32", device.memory.allocate)
    places = [PageBuffer(room.keys[number], room.values[number]) for number in range(stages)]
    return home, StagedPages(device, home, places, layers, queue)


def table(sequence: int) -> npt.NDArray[np.int32]:
    """Return the pages of a sequence, neither in order nor next to each other."""
    return np.array(range(POOL)[::-1][sequence::2], np.int32)


def batch_of(shown: dict[int, list[int]], random: Random) -> Batch:
    """Return some more tokens of one or both sequences."""
    chosen = [sequence for sequence in shown if random.random() < 0.8] or [0]
    counts = [random.choice([1, 1, PAGE_TOKENS // 3]) for _ in chosen]
    positions = [len(shown[s]) + at for s, count in zip(chosen, counts, strict=True) for at in range(count)]
    rows = [s for s, count in zip(chosen, counts, strict=True) for _ in range(count)]
    tables = np.stack([table(sequence) for sequence in range(2)])
    return Batch(np.array(positions, np.int32), np.array(rows, np.int32), tables)


def attended(
    device: Shuffled, pages: StagedPages, layer: int, batch: Batch, step: int
) -> Pending[dict[int, list[int]]]:
    """Start a call like attention: read every sequence, and append to it."""
    with pages.hold(layer, batch) as (keys, values):

        def attend() -> dict[int, list[int]]:
            found = {}
            for sequence in np.unique(batch.sequence).tolist():
                before = int(batch.positions[batch.sequence == sequence].min())
                found[sequence] = stored(keys, batch.tables[sequence], before)
                assert stored(values, batch.tables[sequence], before) == found[sequence]
            for position, sequence in zip(batch.positions, batch.sequence, strict=True):
                page = batch.tables[sequence, position // PAGE_TOKENS]
                for cache in (keys, values):
                    cache[page, 0, position % PAGE_TOKENS, 0] = step + 1
            return found

        return device.start(attend)


def stored(cache: npt.NDArray[np.generic], pages: npt.NDArray[np.int32], count: int) -> list[int]:
    """Return the first `count` numbers in these pages."""
    return [int(value) for value in cache[pages].reshape(-1)[:count]]


@pytest.mark.parametrize("seed", range(30))
def test_a_failed_copy_is_raised_by_wait_and_tried_again(seed: int) -> None:
    random = Random(seed)
    wrong = random.randint(1, 8)
    with ExitStack() as stack:
        device = stack.enter_context(Shuffled(native, seed, lambda number: number == wrong))
        queue = stack.enter_context(closing(TransferQueue()))
        ring, weights = stack.enter_context(ring_of(seed, device, queue))
        streamed = sorted(ring.shelf._contents)
        failures = 0
        for number in [*streamed, *streamed]:
            for _ in range(2):
                try:
                    with ring.hold(number) as data:
                        np.testing.assert_array_equal(device.start(data.copy).wait(), weights[number])
                    break
                except OSError:
                    failures += 1
            else:
                pytest.fail("a copy failed once, and two holds met it")
        assert failures <= (wrong <= device.copies)  # a copy ahead that failed before its hold is made once more
    assert device.memory.used == 0
