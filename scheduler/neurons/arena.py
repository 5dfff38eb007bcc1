"""The neurons on a node's accelerator: slots of one record each, filled by background copies.

    layer.expect(predicted)                     # a prediction: important neurons begin to migrate
    held = layer.divide(scores, threshold)      # divides the active neurons; moves do not overwrite held slots
    ...                                         # the accelerator computes held.slots, the CPU held.cpu_neurons
    held.release()

The host's memory has every neuron, so the CPU computes a neuron whose move is late, and no hold waits for a move. The
error of a failed move is raised when the next step begins. Other rules are those of `scheduler.slots.cache.SlotCache`.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from statistics import median

import numpy as np

from scheduler.neurons.layer import LayerArena
from scheduler.neurons.layout import ArenaLayer
from scheduler.neurons.meter import NeuronMeter
from scheduler.neurons.migration import DYNAMIC, ArenaFigures, MigrationSettings
from scheduler.neurons.moves import NeuronMove
from scheduler.slots.cache import SlotCache, Source
from scheduler.slots.shelf import Load
from scheduler.slots.stats import LoadStats
from scheduler.transfer.queue import TransferQueue
from scheduler.transfer.workers import QueueWorkers
from tpi.devices.base import Device
from tpi.devices.pages import Bytes
from tpi.trace import OFF, NoTrace

ROOM_FIRST = 16  # neurons in a move before the cost of a move is known
ROOM_MOST = 512  # most neurons in a move: the size of the host's staging buffer
_SHARE = 0.8  # share of the time between two layers that copies may take
_STEPS = 8  # number of the latest steps whose median is the pace


class NeuronArena(Source):
    """The arena of one node: slots for neurons in its accelerator's memory, and the source that fills them.

    Each layer's slots are one shelf of a slot cache. Only one thread may divide neurons. Close the queue of transfers
    before freeing the arena's memory.
    """

    def __init__(
        self,
        device: Device,
        memory: Bytes,
        layers: Sequence[ArenaLayer],
        queue: TransferQueue,
        migration: MigrationSettings = DYNAMIC,
        trace: NoTrace = OFF,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Create the arena and fill its slots, which lie layer by layer in the accelerator's `memory`.

        Raises:
            DeviceError: if `memory` does not belong to `device`, or a copy fails.
        """
        self.migration, self.meter, self.figures = migration, NeuronMeter(trace), ArenaFigures()
        self.slots = SlotCache(self, QueueWorkers(queue), LoadStats())
        self._device, self._clock = device, clock
        widest = max((layer.record_bytes for layer in layers), default=0)
        self._staging = device.staging(ROOM_MOST * widest)
        self._expects: list[float] = []  # times at which this step's layers were predicted
        self._paces = deque[float](maxlen=_STEPS)  # seconds from layer to layer
        self.layers: list[LayerArena] = []
        at = 0
        for layer in layers:
            self.layers.append(LayerArena(self, layer, memory[at : at + layer.nbytes]))
            at += layer.nbytes
        for each in self.layers:
            self._fill(each)

    @property
    def pace(self) -> float:
        """Median seconds from one layer to the next within a step; 0 before it is known."""
        return median(self._paces) if self._paces else 0.0

    def begin(self) -> None:
        """Begin a step; raise the error of a move that failed in an earlier step."""
        with self.slots.lock:
            if len(self._expects) > 1:
                self._paces.append((self._expects[-1] - self._expects[0]) / (len(self._expects) - 1))
            self._expects.clear()
        self.slots.raise_failure()

    def wait(self) -> None:
        """Wait until all moves of neurons have ended; their errors are not raised."""
        self.slots.drain()

    # called with the lock held

    def room(self) -> int:
        """Return how many neurons may move now: as many as the link can copy in most of the time of one layer (`pace`).

        Call this once per layer. Return 0 if `MigrationSettings.ahead` moves are queued or running.
        """
        self._expects.append(self._clock())
        if self.slots.queued >= max(1, self.migration.ahead):
            return 0
        line = self.meter.costs.moves.line
        if line is None or not self._paces:
            return ROOM_FIRST
        return min(ROOM_MOST, line.count(_SHARE * self.pace))

    # called by the cache

    def fill(self, loads: Sequence[Load], part: int) -> int:
        """Gather the weights of a move's neurons, and copy them to the accelerator at once.

        Return the bytes of the copy.

        Moves run one at a time, so they share one staging buffer.
        """
        (load,) = loads
        began = self._clock()
        moved = self._copy(load)
        self.meter.record("link", len(load.units), self._clock() - began)
        return moved

    def _copy(self, load: Load) -> int:
        target = load.shelf.place(load.slots)
        gathered = self._staging[: target.size]
        np.take(load.shelf.layer.records, load.units, axis=0, out=gathered.reshape(len(load.units), -1))
        self._device.copy(gathered, target).wait()
        return int(target.size)

    def _fill(self, layer: LayerArena) -> None:
        hot = layer.layer.hot
        for at in range(0, len(hot), ROOM_MOST):
            move = NeuronMove(at, hot[at : at + ROOM_MOST])
            layer.table.place(move.neurons, move.slots)
            self._copy(Load(layer, move.neurons, move.slots))
            layer.table.end(move.slots, arrived=True)
