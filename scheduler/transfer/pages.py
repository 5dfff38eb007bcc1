"""Keys and values that are stored on the host and copied to an accelerator for attention (PIPO, section 3.1.1).

Attention of a layer uses a *buffer*: room for the layer's pages in the accelerator's memory. Pages filled by earlier
steps are loaded into the buffer before attention, and pages that this step appends to are saved to the host afterwards.
With two buffers the next layer's pages are loaded while one layer is computed. A layer's pages are loaded only after
all tokens appended to them have been saved.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby

import numpy as np
import numpy.typing as npt

from scheduler.transfer.queue import QueuedTransfer, TransferQueue
from tpi.devices.base import Device, wait_all
from tpi.devices.pages import Bytes
from tpi.kernels.kv import KvPages
from tpi.kernels.spec import PAGE_TOKENS, Batch, KvArray
from tpi.trace import ON, TransferKind

Pages = frozenset[int]


class PageBuffer:
    """Accelerator memory for one layer's pages, and the numbers of the pages that are in it."""

    def __init__(self, keys: KvArray, values: KvArray) -> None:
        """Create a buffer from arrays like one layer of `tpi.kernels.kv.KvPages`, with the host's page numbers."""
        self.keys, self.values = keys, values
        self.layer = -1
        self.present: set[int] = set()  # pages that are in the buffer, or on their way to it
        self.moves: list[QueuedTransfer] = []  # its loads and saves that may still be running


class StagedPages:
    """The pages of layers whose keys and values pass through buffers. Only the computing thread may use it."""

    def __init__(
        self,
        device: Device,
        host_pages: KvPages,
        buffers: Sequence[PageBuffer],
        layers: Sequence[int],
        queue: TransferQueue,
        link: int = 0,
    ) -> None:
        """Create the staged pages of layers whose keys and values are stored on the host.

        Args:
            device: the accelerator that attends.
            host_pages: the pages in the host's memory.
            buffers: one or two buffers in the device's memory.
            layers: the layers that attend on `device`, in the order of use.
            queue: the queue of the transfers.
            link: the number of the device's link in `queue`.
        """
        self._device, self._host_pages, self._queue, self._link = device, host_pages, queue, link
        self._number = f"{ON}{device.name}" if link else ""
        self._buffers = list(buffers)
        self._next = dict(zip(layers, [*layers[1:], *layers[:1]], strict=True))
        self._saves: dict[int, list[QueuedTransfer]] = {layer: [] for layer in layers}  # may still be running
        self._earlier: dict[int, list[QueuedTransfer]] = {layer: [] for layer in layers}  # saves of earlier steps
        self._lost: Exception | None = None
        self.moved_bytes = 0

    def begin(self) -> None:
        """Begin a step: mark the buffers as empty, because the host's pages may have changed or belong to other
        sequences now.

        Raises:
            Exception: the error of a failed save from an earlier step, usually a DeviceError. Its keys and values are
                lost, so every later step fails too.
        """
        if self._lost is not None:
            raise self._lost
        self._earlier = {layer: list(saves) for layer, saves in self._saves.items()}
        for buffer in self._buffers:
            buffer.layer, buffer.present = -1, set()

    def abandon(self) -> None:
        """Abort the step: forget the errors of its saves, because its tokens will be computed again."""
        self._device.start(lambda: None).wait()  # a save is submitted only once its data is computed
        for layer, saves in self._saves.items():
            for save in list(saves):
                save.join()
                if save not in self._earlier[layer]:
                    saves.remove(save)
        self._lost = next((save.error for saves in self._earlier.values() for save in saves if save.error), None)
        for buffer in self._buffers:
            for move in buffer.moves:
                move.join()
            buffer.moves = []

    def flush(self) -> None:
        """Wait until all appended keys and values are saved on the host; raise the error of a failed save."""
        self._device.start(lambda: None).wait()  # a save is submitted only once its data is computed
        for saves in self._saves.values():
            wait_all(saves)
            saves.clear()

    @contextmanager
    def hold(self, layer: int, batch: Batch) -> Iterator[tuple[KvArray, KvArray]]:
        """Yield the keys and values of `layer` on the accelerator; after the exit, save what `batch` appended to them.

        Raises:
            DeviceError: if a copy failed. Other errors of a transfer are raised unchanged.
        """
        buffer = self._staged(layer, batch)
        if len(self._buffers) > 1 and self._next[layer] > layer:
            self._staged(self._next[layer], batch)
        wait_all([move for move in buffer.moves if move.kind == "kv load"])
        yield buffer.keys, buffer.values
        written = _written(batch)
        buffer.present |= written
        self._device.start(lambda: self._save(buffer, layer, written))

    def _staged(self, layer: int, batch: Batch) -> PageBuffer:
        """Return the buffer for `layer`; start to copy the pages that it lacks and that `batch` attends to."""
        buffer = next((each for each in self._buffers if each.layer == layer), self._buffers[0])
        self._buffers.remove(buffer)
        self._buffers.append(buffer)  # so that the first is always the least recently used
        if buffer.layer != layer:
            self._device.start(lambda: None).wait()  # until the buffer's last save is submitted
            wait_all(buffer.moves)
            buffer.layer, buffer.present, buffer.moves = layer, set(), []
        missing = _filled(batch) - buffer.present
        if missing:
            self._load(buffer, layer, missing)
        return buffer

    def _load(self, buffer: PageBuffer, layer: int, pages: Pages) -> None:
        def load() -> None:
            self._copy(self._host_pages.keys[layer], buffer.keys, pages)
            self._copy(self._host_pages.values[layer], buffer.values, pages)

        after, self._saves[layer] = self._saves[layer], []  # to wait for the load is to wait for these saves
        buffer.present |= pages
        buffer.moves.append(self._submit("kv load", layer, load, after))

    def _save(self, buffer: PageBuffer, layer: int, pages: Pages) -> None:
        def save() -> None:
            self._copy(buffer.keys, self._host_pages.keys[layer], pages)
            self._copy(buffer.values, self._host_pages.values[layer], pages)

        move = self._submit("kv save", layer, save)
        buffer.moves.append(move)
        self._saves[layer].append(move)

    def _submit(
        self, kind: TransferKind, layer: int, call: Callable[[], None], after: Sequence[QueuedTransfer] = ()
    ) -> QueuedTransfer:
        return self._queue.submit(kind, f"KV {layer}{self._number}", call, after, self._link)

    def _copy(self, source: KvArray, target: KvArray, pages: Pages) -> None:
        """Copy `pages` of the array `source` to `target`, with one copy for each run of neighbouring pages."""
        runs = [(_bytes(source[run]), _bytes(target[run])) for run in _runs(pages)]
        wait_all([self._device.copy(here, there) for here, there in runs])
        self.moved_bytes += sum(here.size for here, _ in runs)


def _filled(batch: Batch) -> Pages:
    """Return the pages that hold tokens of the batch's sequences from before `batch`."""
    firsts = {int(row): int(batch.positions[batch.sequence == row].min()) for row in np.unique(batch.sequence)}
    return frozenset(
        int(page) for row, first in firsts.items() for page in batch.tables[row, : -(-first // PAGE_TOKENS)]
    )


def _written(batch: Batch) -> Pages:
    """Return the pages that `batch` appends to."""
    return frozenset(batch.tables[batch.sequence, batch.positions // PAGE_TOKENS].tolist())


def _runs(pages: Pages) -> list[slice]:
    numbered = enumerate(sorted(pages))
    runs = [[page for _, page in run] for _, run in groupby(numbered, key=lambda pair: pair[1] - pair[0])]
    return [slice(run[0], run[-1] + 1) for run in runs]


def _bytes(array: npt.NDArray[np.generic]) -> Bytes:
    return array.reshape(-1).view(np.uint8)
