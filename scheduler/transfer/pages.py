"""Keys and values that live in the host's memory, and are on an accelerator while it attends (PIPO, section 3.1.1).

Attention of a layer finds its pages in a *stage* in the accelerator's memory: loaded before, with what earlier steps
put there, and saved after, with what this step appended. With two stages the next layer's pages are loaded while one
layer is computed. A layer's pages are never loaded before what was last appended to them is saved.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby

import numpy as np
import numpy.typing as npt

from scheduler.transfer.queue import QueuedTransfer, TransferQueue
from tpi.devices.base import Device, wait_all
from tpi.devices.pages import Bytes
from tpi.kernels.spec import PAGE_TOKENS, Batch, KvArray
from tpi.kv import KvPages
from tpi.trace import ON, TransferKind

Pages = frozenset[int]


class PageStage:
    """Room for one layer's pages in the accelerator's memory, and what is there now."""

    def __init__(self, keys: KvArray, values: KvArray) -> None:
        """Both are like one layer of `tpi.kv.KvPages`: a page has the same number here as at home."""
        self.keys, self.values = keys, values
        self.layer = -1
        self.present: set[int] = set()  # pages that are there, or on their way
        self.moves: list[QueuedTransfer] = []  # loads into it and saves from it that may be going on


class StagedPages:
    """The pages of the layers whose keys and values come and go. Used by the thread that computes."""

    def __init__(
        self,
        device: Device,
        home: KvPages,
        stages: Sequence[PageStage],
        layers: Sequence[int],
        queue: TransferQueue,
        link: int = 0,
    ) -> None:
        """`home` lies in the host's memory; `layers` are those that attend on `device`, in the order of use.

        `link` is the number of the queue's link to it.
        """
        self._device, self._home, self._queue, self._link = device, home, queue, link
        self._number = f"{ON}{device.name}" if link else ""
        self._stages = list(stages)
        self._next = dict(zip(layers, [*layers[1:], *layers[:1]], strict=True))
        self._saves: dict[int, list[QueuedTransfer]] = {layer: [] for layer in layers}  # that may be going on
        self._earlier: dict[int, list[QueuedTransfer]] = {
            layer: [] for layer in layers
        }  # of them, from before this step
        self._lost: Exception | None = None
        self.moved_bytes = 0

    def begin(self) -> None:
        """A step begins: pages may have been filled elsewhere, and may mean something else.

        Raises:
            DeviceError: or whatever a save failed with whose step was over: what it was to save is lost for good.
        """
        if self._lost is not None:
            raise self._lost
        self._earlier = {layer: list(saves) for layer, saves in self._saves.items()}
        for stage in self._stages:
            stage.layer, stage.present = -1, set()

    def abandon(self) -> None:
        """The step breaks off: what it appended will be computed again, and need not have been saved."""
        self._device.start(_nothing).wait()
        for layer, saves in self._saves.items():
            for save in list(saves):
                save.join()
                if save not in self._earlier[layer]:
                    saves.remove(save)
        self._lost = next((save.error for saves in self._earlier.values() for save in saves if save.error), None)
        for stage in self._stages:
            for move in stage.moves:
                move.join()
            stage.moves = []

    def settle(self) -> None:
        """Wait until everything that was appended is at home; raises what a save failed with."""
        self._device.start(_nothing).wait()  # saves are asked for when what they save was computed
        for saves in self._saves.values():
            wait_all(saves)
            saves.clear()

    @contextmanager
    def hold(self, layer: int, batch: Batch) -> Iterator[tuple[KvArray, KvArray]]:
        """The pages of `layer` as attention of `batch` wants them; what it appends is saved when it was computed.

        Raises:
            DeviceError: or whatever else a copy failed with.
        """
        stage = self._staged(layer, batch)
        if len(self._stages) > 1 and self._next[layer] > layer:
            self._staged(self._next[layer], batch)
        wait_all([move for move in stage.moves if move.kind == "kv load"])
        yield stage.keys, stage.values
        written = _written(batch)
        stage.present |= written
        self._device.start(lambda: self._save(stage, layer, written))

    def _staged(self, layer: int, batch: Batch) -> PageStage:
        """The stage of a layer, with what `batch` attends to there or on its way."""
        stage = next((each for each in self._stages if each.layer == layer), self._stages[0])
        self._stages.remove(stage)
        self._stages.append(stage)  # the first is the one that was used longest ago
        if stage.layer != layer:
            self._device.start(_nothing).wait()  # its last save is asked for by then
            wait_all(stage.moves)
            stage.layer, stage.present, stage.moves = layer, set(), []
        missing = _filled(batch) - stage.present
        if missing:
            self._load(stage, layer, missing)
        return stage

    def _load(self, stage: PageStage, layer: int, pages: Pages) -> None:
        def load() -> None:
            self._copy(self._home.keys[layer], stage.keys, pages)
            self._copy(self._home.values[layer], stage.values, pages)

        after, self._saves[layer] = self._saves[layer], []  # who waits for the load waits for them
        stage.present |= pages
        stage.moves.append(self._submit("kv load", layer, load, after))

    def _save(self, stage: PageStage, layer: int, pages: Pages) -> None:
        def save() -> None:
            self._copy(stage.keys, self._home.keys[layer], pages)
            self._copy(stage.values, self._home.values[layer], pages)

        move = self._submit("kv save", layer, save)
        stage.moves.append(move)
        self._saves[layer].append(move)

    def _submit(
        self, kind: TransferKind, layer: int, call: Callable[[], None], after: Sequence[QueuedTransfer] = ()
    ) -> QueuedTransfer:
        return self._queue.submit(kind, f"KV {layer}{self._number}", call, after, self._link)

    def _copy(self, source: KvArray, target: KvArray, pages: Pages) -> None:
        """Copy pages of one array, neighbours at once."""
        runs = [(_bytes(source[run]), _bytes(target[run])) for run in _runs(pages)]
        wait_all([self._device.copy(here, there) for here, there in runs])
        self.moved_bytes += sum(here.size for here, _ in runs)


def _filled(batch: Batch) -> Pages:
    """Pages that hold tokens from before `batch`, of every sequence in it."""
    firsts = {int(row): int(batch.positions[batch.sequence == row].min()) for row in np.unique(batch.sequence)}
    return frozenset(
        int(page) for row, first in firsts.items() for page in batch.tables[row, : -(-first // PAGE_TOKENS)]
    )


def _written(batch: Batch) -> Pages:
    """Pages that `batch` appends to."""
    return frozenset(batch.tables[batch.sequence, batch.positions // PAGE_TOKENS].tolist())


def _runs(pages: Pages) -> list[slice]:
    """Pages as runs of neighbours."""
    numbered = enumerate(sorted(pages))
    runs = [[page for _, page in run] for _, run in groupby(numbered, key=lambda pair: pair[1] - pair[0])]
    return [slice(run[0], run[-1] + 1) for run in runs]


def _bytes(array: npt.NDArray[np.generic]) -> Bytes:
    return array.reshape(-1).view(np.uint8)


def _nothing() -> None:
    """A call that comes after those before it."""
