"""The neurons on a node's accelerator: slots of one record each, filled by background copies.

    layer.expect(predicted)                     # a prediction: neurons that are worth it begin to migrate
    held = layer.divide(scores, threshold)      # divides the active neurons; moves do not overwrite held slots
    ...                                         # the accelerator computes held.slots, the CPU held.here
    held.release()

The host's memory has every neuron, so the CPU computes a neuron whose move is late. The error of a failed move is
raised when the next step begins.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from statistics import median
from threading import Lock

import numpy as np

from scheduler.neurons.layer import LayerArena
from scheduler.neurons.layout import ArenaLayer
from scheduler.neurons.meter import NeuronMeter
from scheduler.neurons.moves import NeuronMove
from scheduler.neurons.moving import DYNAMIC, ArenaFigures, MigrationSettings
from scheduler.slots.table import SlotTable
from scheduler.transfer.queue import QueuedTransfer, TransferQueue
from tpi.devices.base import Device
from tpi.devices.pages import Bytes
from tpi.trace import OFF, NoTrace

ROOM_FIRST = 16  # neurons in a move before the cost of a move is known
ROOM_MOST = 512  # most neurons in a move: the size of the host's staging buffer
_SHARE = 0.8  # share of the time between two layers that copies may take
_STEPS = 8  # latest steps that count for the pace


class NeuronArena:
    """The arena of one node. One thread divides neurons; the owner closes the queue before it frees the memory."""

    def __init__(
        self,
        device: Device,
        memory: Bytes,
        layers: Sequence[ArenaLayer],
        queue: TransferQueue,
        moving: MigrationSettings = DYNAMIC,
        link: int = 0,
        trace: NoTrace = OFF,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Fill the slots of all `layers`, which lie one after the other in the accelerator's `memory`.

        Raises:
            DeviceError: if `memory` does not belong to `device`, or a copy fails.
        """
        self.moving, self.meter, self.figures, self.lock = moving, NeuronMeter(trace), ArenaFigures(), Lock()
        self._device, self._queue, self._link, self._clock = device, queue, link, clock
        widest = max((layer.record_bytes for layer in layers), default=0)
        self._staging = device.staging(ROOM_MOST * widest)
        self._under_way: list[QueuedTransfer] = []
        self._expects: list[float] = []  # times at which this step's layers were predicted
        self._paces = deque[float](maxlen=_STEPS)  # seconds from layer to layer
        self.layers: list[LayerArena] = []
        at = 0
        for layer in layers:
            fixed = layer.fixed if moving.migrate else layer.slots
            data = memory[at : at + layer.nbytes]
            table = SlotTable(layer.neurons, layer.slots, np.int32, fixed)
            self.layers.append(LayerArena(self, layer, data, table))
            at += layer.nbytes
        for each in self.layers:
            self._fill(each)

    @property
    def pace(self) -> float:
        """Seconds from one layer to the next within a step; 0 before it is known."""
        return median(self._paces) if self._paces else 0.0

    def begin(self) -> None:
        """Begin a step; raise the error of a move of an earlier step that failed."""
        with self.lock:
            if len(self._expects) > 1:
                self._paces.append((self._expects[-1] - self._expects[0]) / (len(self._expects) - 1))
            self._expects.clear()
            ended, self._under_way = self._sorted()
        for transfer in ended:
            transfer.wait()

    def settle(self) -> None:
        """Wait until all moves have ended, without raising their errors."""
        for transfer in list(self._under_way):
            transfer.join()

    # called with the lock held

    def room(self) -> int:
        """Return how many neurons may move now: as many as the link carries from one layer to the next."""
        self._expects.append(self._clock())
        if sum(not transfer.done for transfer in self._under_way) >= max(1, self.moving.ahead):
            return 0
        line = self.meter.costs.moves.line
        if line is None or not self._paces:
            return ROOM_FIRST
        return min(ROOM_MOST, line.count(_SHARE * self.pace))

    def submit(self, layer: LayerArena, move: NeuronMove) -> None:
        """Queue the copy of a move whose slots are marked as loading."""
        name = f"{len(move.neurons)} neurons of {layer.layer.name}"
        call = lambda: self._make(layer, move)  # noqa: E731
        ended = [transfer for transfer in self._under_way if not transfer.done or transfer.error is not None]
        self._under_way = [*ended, self._queue.submit("weight load", name, call, link=self._link)]

    # run by the transfer queue

    def _make(self, layer: LayerArena, move: NeuronMove) -> None:
        arrived = False
        began = self._clock()
        try:
            self._copy(layer, move)
            arrived = True
        finally:
            with self.lock:
                layer.table.end(move.slots, arrived)
                if arrived:
                    self.figures.moves += 1
                    self.figures.moved += len(move.neurons)
                    self.figures.moved_bytes += len(move.neurons) * layer.layer.record_bytes
        self.meter.took("link", len(move.neurons), self._clock() - began)

    def _copy(self, layer: LayerArena, move: NeuronMove) -> None:
        """Gather the records and copy them at once; moves run one at a time, so they share one staging buffer."""
        target = layer.place(move)
        gathered = self._staging[: target.size]
        np.take(layer.layer.records, move.neurons, axis=0, out=gathered.reshape(len(move.neurons), -1))
        self._device.copy(gathered, target).wait()

    def _fill(self, layer: LayerArena) -> None:
        """Copy the layer's hot neurons into its slots."""
        hot = layer.layer.hot
        for at in range(0, len(hot), ROOM_MOST):
            move = NeuronMove(at, hot[at : at + ROOM_MOST])
            layer.table.place(move.neurons, move.slots)
            self._copy(layer, move)
            layer.table.end(move.slots, arrived=True)

    def _sorted(self) -> tuple[list[QueuedTransfer], list[QueuedTransfer]]:
        """Return the moves that have ended and the moves that have not."""
        over = [transfer for transfer in self._under_way if transfer.done]
        return over, [transfer for transfer in self._under_way if not transfer.done]
