"""KV pages in host memory that visit the accelerator micro-batch by micro-batch (MoE-Lightning's D4, FlexGen's zigzag).

A *visit* is the attention of one micro-batch in one layer. Its pages are loaded into a buffer on the accelerator,
attention is computed, and the pages that it appended to are saved to host memory. While one micro-batch computes, the
pages of the next are loaded into another buffer. Pages have other numbers in a buffer than in host memory, since a
buffer holds the pages of only one micro-batch. Only the thread of the block loop uses this module.
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
from tpi.kernels.kv import KvPages
from tpi.kernels.spec import PAGE_TOKENS, Batch, KvArray

Visit = tuple[int, int]  # the numbers of a layer and of a micro-batch of the step


@dataclass(eq=False)
class PageBuffer:
    """Accelerator memory for the pages of one micro-batch, and host memory as the other side of copies.

    Attributes:
        keys: on the accelerator, `[pages, ...]` as in `tpi.kernels.kv.KvPages`.
        values: on the accelerator, likewise.
        staged: keys and values in the host's buffer, likewise.
        loaded: the last load into this buffer.
        ended: the last save from this buffer. It is pending until the attention of the visit is computed.
    """

    keys: KvArray
    values: KvArray
    staged: tuple[KvArray, KvArray]
    loaded: QueuedTransfer | None = None
    ended: "Pending[QueuedTransfer]" = field(default_factory=lambda: Finished(_nothing_to_save))


@dataclass(frozen=True)
class PageNumbers:
    """The KV pages that a micro-batch needs, in the order in which they lie in a buffer.

    Attributes:
        host_pages: the numbers of the pages in host memory.
        filled: how many of the first pages hold tokens of earlier steps or micro-batches.
        written: the index of the first page that the micro-batch appends to; it appends to all later ones too.
        batch: the micro-batch with the pages' numbers in the buffer.
    """

    host_pages: tuple[int, ...]
    filled: int
    written: int
    batch: Batch


@dataclass(frozen=True)
class _Save:
    """A save of one layer's `pages`, numbered as in host memory.

    `ended.wait()` returns the ended transfer.
    """

    pages: frozenset[int]
    ended: "Pending[QueuedTransfer]"

    @property
    def succeeded(self) -> bool:
        """True if the save has ended without an error."""
        return self.ended.done and self.ended.wait().done and self.ended.wait().error is None


class VisitingPages:
    """The buffers of one accelerator, and the transfers between them and the KV pages in host memory."""

    def __init__(self, device: Device, home: KvPages, rooms: Sequence[PageBuffer], queue: TransferQueue) -> None:
        self._device, self._home, self._rooms, self._queue = device, home, list(rooms), queue
        self._numbers: list[PageNumbers] = []  # the pages of each micro-batch of this step
        self._next: dict[Visit, Visit] = {}
        self._ahead: dict[Visit, PageBuffer] = {}  # buffers that are loaded, or being loaded, by visit
        self._saves: dict[int, list[_Save]] = {}  # saves that may not have ended, by layer
        self._earlier: list[_Save] = []  # saves of earlier steps
        self._lost: Exception | None = None
        self.moved_bytes = 0

    @property
    def capacity(self) -> int:
        """The number of pages that one buffer holds."""
        return len(self._rooms[0].keys)

    def begin(self, batches: Sequence[Batch], visits: Sequence[Visit]) -> None:
        """Begin a step. The pages of each visit will be loaded while the visit before it is computed.

        Args:
            batches: the micro-batches of the step.
            visits: the layer and the micro-batch of every visit of the step, in order.

        Raises:
            DeviceError: if a save of an earlier step failed, since its keys and values are lost. Other errors of the
                save are raised as they are.
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
        """Yield the keys and values of a visit on the accelerator, and the batch with the pages' numbers there.

        Start the call that uses the keys and values inside the `with` statement. After it, the appended pages are
        saved.

        Args:
            layer: the layer of the visit.
            number: the micro-batch's number in the step.

        Raises:
            DeviceError: if the pages could not be copied. Other errors of the transfer are raised as they are.
        """
        room = self._ahead.pop((layer, number), None) or self._load(layer, number)
        assert room.loaded is not None
        room.loaded.wait()
        numbers = self._numbers[number]
        yield room.keys, room.values, numbers.batch
        room.ended = self._device.start(lambda: self._save(room, layer, numbers))
        written = frozenset(numbers.host_pages[numbers.written :])
        self._saves.setdefault(layer, []).append(_Save(written, room.ended))
        if (then := self._next.get((layer, number))) is not None and len(self._rooms) > 1:
            self._ahead[then] = self._load(*then)

    def wait_saved(self) -> None:
        """Wait until all appended pages are in host memory.

        Raises:
            DeviceError: if a save failed. Other errors of the save are raised as they are.
        """
        for saves in self._saves.values():
            wait_all([save.ended.wait() for save in saves])
            saves.clear()
        self._earlier = []

    def abandon(self) -> None:
        """Abort the step: wait for its transfers and discard their results, as its tokens will be computed again.

        If a save of an earlier step failed, the next `begin` raises its error.
        """
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

    def _load(self, layer: int, number: int) -> PageBuffer:
        """Load a visit's pages into the least recently used buffer, and return the buffer.

        The load waits for earlier saves from that buffer, and for saves of the same pages.
        """
        room = self._rooms.pop(0)
        self._rooms.append(room)
        numbers, before = self._numbers[number], room.ended
        pages = numbers.host_pages[: numbers.filled]
        saves = [save.ended for save in self._saves.get(layer, []) if save.pages & set(pages)]

        def load() -> None:
            for ended in (before, *saves):
                ended.wait().wait()
            self._copy_in(layer, room, list(pages))

        room.loaded = self._queue.submit("kv load", f"KV {layer}, micro-batch {number}", load)
        return room

    def _save(self, room: PageBuffer, layer: int, numbers: PageNumbers) -> QueuedTransfer:
        pages = slice(numbers.written, len(numbers.host_pages))

        def save() -> None:
            both = zip((room.keys, room.values), room.staged, strict=True)
            self._move([(_bytes(array[pages]), _bytes(staged[pages])) for array, staged in both])
            home = list(numbers.host_pages[pages])
            self._home.keys[layer][home] = room.staged[0][pages]
            self._home.values[layer][home] = room.staged[1][pages]

        return self._queue.submit("kv save", f"KV {layer}, micro-batch saved", save)

    def _copy_in(self, layer: int, room: PageBuffer, pages: list[int]) -> None:
        """Gather the KV pages `pages` in the host's buffer, and copy them to the accelerator at once.

        Many small copies would be slow.
        """
        if not pages:
            return
        some = slice(0, len(pages))
        for home, staged in zip((self._home.keys[layer], self._home.values[layer]), room.staged, strict=True):
            np.take(home, pages, axis=0, out=staged[some])
        both = zip(room.staged, (room.keys, room.values), strict=True)
        self._move([(_bytes(staged[some]), _bytes(array[some])) for staged, array in both])

    def _move(self, ends: Sequence[tuple[Bytes, Bytes]]) -> None:
        wait_all([self._device.copy(source, target) for source, target in ends])
        self.moved_bytes += sum(source.size for source, _ in ends)


def page_numbers(batch: Batch) -> PageNumbers:
    """Return the pages of a micro-batch.

    Pages that the micro-batch only reads come first, then pages that it also appends to, then new pages.
    """
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
    """A save of no pages, which has ended already. It is the last save of a buffer that no pages were saved from."""

    def __init__(self) -> None:
        super().__init__("kv save", "nothing", _no_call, ())
        self.run()


def _no_call() -> None:
    """Do nothing. This takes the place of a call that moves pages."""


def _nothing_to_save() -> QueuedTransfer:
    return _Nothing()


def _ended(ended: "Pending[QueuedTransfer]") -> Exception | None:
    try:
        ended.wait().wait()
    except Exception as error:  # noqa: BLE001 - the next step raises it if the save was of an earlier step
        return error
    return None
