"""A cache of a node's experts on its accelerator, with the prediction of the experts that the next block needs."""

import time
from collections.abc import Mapping, Sequence

import numpy as np

from scheduler.demand.cache import DemandCache
from scheduler.demand.choice.cliff import DEFAULT_POLICY
from scheduler.demand.choice.first import trained_policy, units_to_keep
from scheduler.demand.choice.replay import Recording, ReplayResult, bound_with_bypass
from scheduler.demand.choice.select import SelectedPolicy, select
from scheduler.demand.loads import IdleGaps, IdleUnlessDemanded
from scheduler.demand.policies import Key
from scheduler.demand.shared import SharedHold
from scheduler.demand.sources import HostUnits
from scheduler.model.experts.costs import ExpertCosts, divide
from scheduler.slots.stats import ReadClock
from scheduler.transfer.queue import TransferQueue
from scheduler.transfer.workers import QueueWorkers
from tpi.devices.base import Device, Finished, Pending
from tpi.devices.pages import Bytes
from tpi.errors import DeviceError
from tpi.kernels.constants import STREAM_TOKENS
from tpi.kernels.spec import F32, RouterSpec
from tpi.trace import OFF, NoTrace
from worker.demand.best import best_note, hits, megabytes

_BELADY = "Belady's policy:"


class LinkedExperts(HostUnits):
    """Experts in the host's memory that are copied to a device."""

    def __init__(self, device: Device, units: Mapping[Key, Bytes]) -> None:
        """Create a source of `units`, the bytes of each expert in the host's memory."""
        super().__init__(device, {key: _Stays(data) for key, data in units.items()}, [len(d) for d in units.values()])
        self._name = device.name

    def fill(self, units: Sequence[int], slots: Sequence[Bytes]) -> int:
        """Copy experts into their slots; raise DeviceError, naming the expert, if a copy fails."""
        try:
            return super().fill(units, slots)
        except Exception as error:
            block, expert = self.keys[units[0]]
            raise DeviceError(f"expert {expert} of block {block} cannot be copied to {self._name}: {error}") from error


class ExpertArena:
    """A cache of whole experts in a device's memory. Only one thread, and calls on the device, use it.

    Attributes:
        short: True if the current step is short. Longer steps use cached experts but load none.
        routers: the router of each block of experts, by the block's number.
    """

    def __init__(
        self,
        device: Device,
        memory: Bytes,
        units: Mapping[Key, Bytes],
        costs: ExpertCosts,
        queue: TransferQueue,
        recording: Recording | None = None,
        trace: NoTrace = OFF,
    ) -> None:
        """Divide `memory` into slots, and fill them with experts.

        Args:
            device: the accelerator.
            memory: a part of the accelerator's memory.
            units: the bytes of each expert in the host's memory.
            costs: the times to compute and to copy an expert, by which `share` divides experts.
            queue: copies experts to the device.
            recording: a recording of the model's routing; the experts that it uses most fill the slots at first.
            trace: recorder of copies.

        Raises:
            DeviceError: if an expert cannot be copied.
        """
        self.short, self.routers = True, dict[int, RouterSpec]()
        self._device, self._costs = device, costs
        self._source = LinkedExperts(device, units)
        self._known = frozenset(units)
        self._asked: Pending[None] | None = None  # the last prediction
        slots = memory.size // max(1, self._source.slot_bytes)
        self.policy = SelectedPolicy(DEFAULT_POLICY) if recording is None else select(recording, slots)
        policy = trained_policy(self.policy.choice, list(units), recording)
        # times of copies; times from a prediction to the block that it is for
        self._reads, self._gaps = ReadClock(), IdleGaps(time.perf_counter)
        workers = QueueWorkers(queue, "experts")
        self.cache = DemandCache(
            self._source,
            memory,
            policy,
            workers,
            device=device,
            reads=self._reads,
            trace=trace,
            idle=IdleUnlessDemanded(),
        )
        self._first = units_to_keep(policy, list(units), self.cache.capacity)
        try:
            self.cache.warm(self._first)
        except BaseException:
            self.cache.close()
            raise
        self._best: ReplayResult | None = None  # the last result of `best`

    def share(self, block: int, wanted: Mapping[int, int]) -> SharedHold:
        """Hold the experts of a block that the accelerator should compute; the CPU computes the others.

        The accelerator gets the cached experts. In a short step it also gets experts that are copied now, where copying
        is faster than computing on the CPU. `wanted` has the number of tokens that use each expert, by the expert's
        number.
        """
        keys = [(block, expert) for expert in wanted]
        self._gaps.asked(loads=True)
        if not self.short:
            return self.cache.present(keys)

        def fetched(ready: Sequence[Key], late: Sequence[Key]) -> int:
            there, absent = ([float(wanted[expert]) for _, expert in each] for each in (ready, late))
            return divide(self._costs, there, absent).fetched

        return self.cache.share(keys, fetched)

    def prefetch_next(self, block: int, x: F32) -> None:
        """Prefetch the experts that the next block's router chooses for the hidden states `x` of this one.

        Do nothing if copying an expert takes longer than the usual time from one block to the next.
        """
        self.wait()
        following = min((number for number in self.routers if number > block), default=None)
        if following is None or len(x) > STREAM_TOKENS or not self.short:
            return
        self._gaps.loaded()
        if not self._in_time():
            return
        router, seen, kernels = self.routers[following], x.copy(), self._device.kernels

        def ask() -> None:
            chosen = sorted(set(kernels.route(router, seen).experts.ravel().tolist()))
            self.cache.expect([key for key in ((following, expert) for expert in chosen) if key in self._known])

        self._asked = self._device.start(ask)

    def wait(self) -> None:
        """Wait for the last prediction; raise its error if it failed."""
        asked, self._asked = self._asked, None
        if asked is not None:
            asked.wait()

    def begin(self, short: bool) -> None:
        """Begin a step; raise the error of an earlier copy that failed without a caller waiting for it.

        `short` is True if the step is short; a longer step uses cached experts but loads none.
        """
        self.cache.slots.raise_failure()
        self.short = short
        if short:
            self.cache.begin()

    def abandon(self) -> None:
        """Discard the prediction and errors of a step that was aborted."""
        asked, self._asked = self._asked, None
        if asked is not None:
            Finished(asked.wait)
        self.cache.abandon()

    def describe(self) -> str:
        """Return the cache's statistics as a part of a sentence for the user."""
        stats, units, (_, recorded) = self.cache.stats(), len(self._source.keys), self.cache.recording()
        best, here = self.best(), stats.elsewhere / max(1, stats.uses)
        return (
            f"{self.cache.capacity} of these {units} at a time: {hits(stats)} of the chosen experts were there "
            f"{best_note(hits, stats, recorded, best, _BELADY)}, the CPU computed {here:.0%}; {megabytes(stats)} MB "
            f"crossed the link per step {best_note(megabytes, stats, recorded, best, _BELADY)}; {stats.ahead} experts "
            f"were prefetched ({stats.ahead_used} used, {stats.ahead_wasted} wasted); evicted {self.policy.sentence}"
        )

    def best(self) -> ReplayResult:
        """Return the hit rate and bytes of Belady's optimal policy in the recorded steps.

        The simulated cache begins with the experts that filled this cache at first.
        """
        recording, _ = self.cache.recording()
        if self._best is None or len(recording.steps) != self._best.steps:
            number = {key: at for at, key in enumerate(self._source.keys)}
            first = np.array([number[key] for key in self._first], np.int64)
            self._best = bound_with_bypass(recording, first, self._source.slot_bytes)
        return self._best

    def close(self) -> None:
        """Stop loading experts. Further calls do nothing."""
        self.cache.close()

    def _in_time(self) -> bool:
        """Return True if an expert is copied in less than the usual time from a prediction to the predicted block."""
        speed = self.cache.loaded_bytes / (self._reads.seconds or 1.0)
        return self._gaps.usual * speed >= self._source.slot_bytes


class _Stays:
    """A context manager that yields `data`, bytes that stay in memory. It can be entered several times."""

    def __init__(self, data: Bytes) -> None:
        self._data = data

    def __enter__(self) -> Bytes:
        return self._data

    def __exit__(self, *_: object) -> None:
        """Do nothing: the experts stay in memory."""
