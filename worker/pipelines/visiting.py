"""Keys and values in RAM that visit the accelerator micro-batch by micro-batch (MoE-Lightning's D4, FlexGen's zigzag).

A *visit* is one micro-batch in one layer: its pages are loaded into one of two rooms, attention is computed there, and
what it appended is saved. While one micro-batch computes, the pages of the next are loaded. In a room pages have other
numbers than at home, since a room holds those of one micro-batch only. Used by the thread that runs the block loop.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from scheduler.transfer.queue import QueuedTransfer, TransferQueue
from tpi.devices.base import Device, Finished, Pending, wait_all
from tpi.devices.pages import Bytes
from tpi.kernels.spec import PAGE_TOKENS, Batch, KvArray
from tpi.kv import KvPages

Visit = tuple[int, int]  # a layer, and a micro-batch of the step
ROOMS = 2


@dataclass(eq=False)
class PageRoom:
    """Memory of the accelerator for the pages of one micro-batch, and the host's that it is copied from and to.

    Keys and values are `[pages, ...]`, as in `tpi.kv.KvPages`; `staged` are those of the host.
    """

    keys: KvArray
    values: KvArray
    staged: tuple[KvArray, KvArray]
    loaded: QueuedTransfer | None = None
    ended: "Pending[QueuedTransfer]" = field(default_factory=lambda: Finished(_nothing_to_save))


@dataclass(frozen=True)
class PageNumbers:
    """Which pages a micro-batch needs, in the order of a room, and its batch as the room numbers them.

    Attributes:
        home: their numbers at home.
        filled: how many of the first hold tokens of earlier steps or micro-batches.
        written: from which of them on it appends to them, all to the last.
    """

    home: tuple[int, ...]
    filled: int
    written: int
    batch: Batch


@dataclass(frozen=True)
class _Save:
    """What was, or will be, saved of a layer: pages at home, and who knows the transfer when it is asked for."""

    pages: frozenset[int]
    ended: "Pending[QueuedTransfer]"

    @property
    def succeeded(self) -> bool:
        """Whether it is over, and nobody needs to wait for it."""
        return self.ended.done and self.ended.wait().done and self.ended.wait().error is None


class VisitingPages:
    """The rooms of one accelerator."""

    def __init__(self, device: Device, home: KvPages, rooms: Sequence[PageRoom], queue: TransferQueue) -> None:
        self._device, self._home, self._rooms, self._queue = device, home, list(rooms), queue
        self._numbers: list[PageNumbers] = []  # of each micro-batch of this step
        self._next: dict[Visit, Visit] = {}
        self._ahead: dict[Visit, PageRoom] = {}  # loaded, or on their way, before they are held
        self._saves: dict[int, list[_Save]] = {}  # by layer
        self._earlier: list[_Save] = []  # of steps that are over
        self._lost: Exception | None = None
        self.moved_bytes = 0

    @property
    def capacity(self) -> int:
        """Pages that a room holds."""
        return len(self._rooms[0].keys)

    def begin(self, batches: Sequence[Batch], visits: Sequence[Visit]) -> None:
        """A step begins that makes these visits, in this order, with the micro-batches `batches`.

        Raises:
            DeviceError: or whatever a save of an earlier step failed with: what it was to save is lost for good.
        """
        if self._lost is not None:
            raise self._lost
        for saves in self._saves.values():
            saves[:] = [save for save in saves if not save.succeeded]
        self._earlier = [save for saves in self._saves.values() for save in saves]
        self._numbers = [page_numbers(batch) for batch in batches]
        self._next = dict(pairwise(visits))
        self._ahead.clear()

    @contextmanager
    def hold(self, layer: int, number: int) -> Iterator[tuple[KvArray, KvArray, Batch]]:
        """The pages of a visit for a call that is started inside the `with`: keys, values, and the batch to give it.

        Raises:
            DeviceError: or whatever else a copy failed with.
        """
        room = self._ahead.pop((layer, number), None) or self._load(layer, number)
        assert room.loaded is not None
        room.loaded.wait()
        numbers = self._numbers[number]
        yield room.keys, room.values, numbers.batch
        room.ended = self._device.start(lambda: self._save(room, layer, numbers))
        written = frozenset(numbers.home[numbers.written :])
        self._saves.setdefault(layer, []).append(_Save(written, room.ended))
        if (then := self._next.get((layer, number))) is not None and len(self._rooms) > 1:
            self._ahead[then] = self._load(*then)

    def settle(self) -> None:
        """Wait until everything that was appended is at home; raises what a save failed with."""
        for saves in self._saves.values():
            wait_all([save.ended.wait() for save in saves])
            saves.clear()
        self._earlier = []

    def abandon(self) -> None:
        """The step breaks off: what it appended will be computed again, and need not have been saved."""
        for saves in self._saves.values():
            for save in saves:
                _ended(save.ended)
        failed = (error for save in self._earlier if (error := _ended(save.ended)))
        self._lost = next(failed, self._lost)
        for room in self._rooms:
            if room.loaded is not None:
                room.loaded.join()
            room.ended = Finished(_nothing_to_save)
        self._saves.clear()
        self._ahead.clear()

    def _load(self, layer: int, number: int) -> PageRoom:
        """Have a visit's pages loaded, into the room that was used longest ago, when that and they are free."""
        room = self._rooms.pop(0)
        self._rooms.append(room)
        numbers, before = self._numbers[number], room.ended
        pages = numbers.home[: numbers.filled]
        saves = [save.ended for save in self._saves.get(layer, []) if save.pages & set(pages)]

        def load() -> None:
            for ended in (before, *saves):
                ended.wait().wait()
            self._lift(layer, room, list(pages))

        room.loaded = self._queue.submit("kv load", f"KV {layer}, micro-batch {number}", load)
        return room

    def _save(self, room: PageRoom, layer: int, numbers: PageNumbers) -> QueuedTransfer:
        pages = slice(numbers.written, len(numbers.home))

        def save() -> None:
            there = zip((room.keys, room.values), room.staged, strict=True)
            ends = [(_bytes(array[pages]), _bytes(staged[pages])) for array, staged in there]
            self._move(ends)
            home = list(numbers.home[pages])
            self._home.keys[layer][home] = room.staged[0][pages]
            self._home.values[layer][home] = room.staged[1][pages]

        return self._queue.submit("kv save", f"KV {layer}, micro-batch saved", save)

    def _lift(self, layer: int, room: PageRoom, pages: list[int]) -> None:
        """Gather pages of the host, and copy them at once: a copy of each alone would mostly wait to begin."""
        if not pages:
            return
        some = slice(0, len(pages))
        for home, staged in zip((self._home.keys[layer], self._home.values[layer]), room.staged, strict=True):
            np.take(home, pages, axis=0, out=staged[some])
        there = zip(room.staged, (room.keys, room.values), strict=True)
        self._move([(_bytes(staged[some]), _bytes(array[some])) for staged, array in there])

    def _move(self, ends: Sequence[tuple[Bytes, Bytes]]) -> None:
        wait_all([self._device.copy(source, target) for source, target in ends])
        self.moved_bytes += sum(source.size for source, _ in ends)


def page_numbers(batch: Batch) -> PageNumbers:
    """The pages of a micro-batch's sequences: those it reads alone, those it also appends to, and new ones."""
    rows, sequence = np.unique(batch.sequence, return_inverse=True)
    ends = np.array([batch.positions[batch.sequence == row].max() + 1 for row in rows])
    firsts = np.array([batch.positions[batch.sequence == row].min() for row in rows])
    whole, full, last = firsts // PAGE_TOKENS, -(-firsts // PAGE_TOKENS), -(-ends // PAGE_TOKENS)
    lists = [batch.tables[row, :count].tolist() for row, count in zip(rows, last, strict=True)]
    read = [page for pages, count in zip(lists, whole, strict=True) for page in pages[:count]]
    both = [page for pages, a, b in zip(lists, whole, full, strict=True) for page in pages[a:b]]
    new = [page for pages, count in zip(lists, full, strict=True) for page in pages[count:]]
    home = list(dict.fromkeys([*read, *both, *new]))
    places = {page: at for at, page in enumerate(home)}
    tables = np.zeros((len(rows), max(last.tolist(), default=0)), np.int32)
    for row, pages in enumerate(lists):
        tables[row, : len(pages)] = [places[page] for page in pages]
    compact = Batch(batch.positions, sequence.astype(np.int32), tables)
    return PageNumbers(tuple(home), len(home) - len(new), len(set(read)), compact)


def _bytes(array: npt.NDArray[np.generic]) -> Bytes:
    return array.reshape(-1).view(np.uint8)


class _Nothing(QueuedTransfer):
    """What is over before it began."""

    def __init__(self) -> None:
        super().__init__("kv save", "nothing", _no_call, ())
        self.run()


def _no_call() -> None:
    """Nothing is moved."""


def _nothing_to_save() -> QueuedTransfer:
    return _Nothing()


def _ended(ended: "Pending[QueuedTransfer]") -> Exception | None:
    """What a save failed with, when it is over."""
    try:
        ended.wait().wait()
    except Exception as error:  # noqa: BLE001 - it surfaces in the next step, if it is of one that was over
        return error
    return None
