"""The model of time of one emulated node: its serial resources, and the factor by which all times are stretched."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tpi.devices.base import Event, Finished
from tpi.devices.emulated.clock import EmulatedClock
from tpi.devices.emulated.kernels import TimedKernels
from tpi.devices.emulated.lane import TimedLane, TimedLink
from tpi.devices.emulated.machine import EmulatedMachine
from tpi.devices.emulated.stretch import StretchFactor
from tpi.devices.emulated.thread import TimedThread
from tpi.devices.emulated.work import Roofline
from tpi.devices.host import HostDevice, check_sizes
from tpi.devices.pages import Bytes
from tpi.kernels import Kernels


@dataclass(frozen=True)
class EmulatedHost(HostDevice):
    """A host in emulated time: its `kernels` are timed, and its copies take as long as on the link `copies`."""

    copies: TimedLink | None = None

    def copy(self, source: Bytes, target: Bytes) -> Event:
        """Copy in the calling thread, in the emulated time of the link `copies`; return an event that has ended."""
        check_sizes(source, target)
        if self.copies is None:
            return super().copy(source, target)
        copies = self.copies
        return Finished(lambda: copies.move(source.size, lambda: np.copyto(target, source)))


class Emulation:
    """The lanes of an accelerator and its host; each is a serial resource, and all run in parallel.

    Attributes:
        compute, processor: lanes of the accelerator's kernels and of the host's.
        up, down, within: copies to the accelerator, from it, and inside its memory.
        disk: reads; used by `scheduler.storage.timed.TimedDisk`.
    """

    def __init__(
        self,
        machine: EmulatedMachine,
        same_node: "Emulation | None" = None,
        real: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        """Create the lanes of `machine`.

        `same_node` is the emulation of another accelerator of the same node, or None. Its host, disk, clock and stretch
        are shared. `real` returns the real time in seconds; `sleep` sleeps for a number of seconds.
        """
        self.machine = machine
        self.clock: EmulatedClock = same_node.clock if same_node else EmulatedClock(real, sleep)
        self.stretch_factor: StretchFactor = same_node.stretch_factor if same_node else StretchFactor(machine.stretch)
        self.compute = self._lane("compute")
        self.up = TimedLink(self._lane("up"), machine.up, machine.latency)
        self.down = TimedLink(self._lane("down"), machine.down, machine.latency)
        self.within = TimedLink(self._lane("within"), machine.memory / 2, machine.launch)  # read and written
        self.processor: TimedLane = same_node.processor if same_node else self._lane("host")
        self.disk: TimedLink = same_node.disk if same_node else TimedLink(self._lane("disk"), machine.disk)

    @property
    def lanes(self) -> list[TimedLane]:
        """All lanes of the accelerator and the host."""
        return [self.compute, self.processor, *(link.lane for link in (self.up, self.down, self.within, self.disk))]

    @property
    def stretch(self) -> float:
        """Real seconds that one emulated second takes."""
        return self.stretch_factor.stretch

    @property
    def overruns(self) -> int:
        """Number of tasks since calibration whose real work took more than half of their time slot."""
        return self.stretch_factor.overruns

    def emulated_seconds(self, seconds: float) -> float:
        """Convert `seconds` of real time to seconds of the emulated machine."""
        return seconds / self.stretch

    def calibrate(self) -> float:
        """Choose the stretch factor from the tasks run so far, and return it. Call this after a rehearsal."""
        return self.stretch_factor.calibrate()

    def check(self, allowed: float = 0.0) -> None:
        """Raise EmulationError if more than the share `allowed` of the tasks overran; call this after a run."""
        self.stretch_factor.check(allowed)

    def host(self, device: HostDevice) -> EmulatedHost:
        """Return the host of the emulated node, with the memory and the results of `device`."""
        rates = Roofline(self.machine.host_memory, self.machine.host_flops, self.machine.launch)
        kernels = TimedKernels(device.kernels, self.processor, rates)
        copies = TimedLink(self.processor, self.machine.host_memory / 2)  # read and written
        return EmulatedHost(kernels, device.memory, device.name, copies)

    def thread(self, name: str) -> TimedThread:
        """Return another thread that runs in emulated time; the caller must close it."""
        return TimedThread(f"{self.machine.name}-{name}", self.clock)

    def accelerate(self, kernels: Kernels) -> TimedKernels:
        """Return kernels with the results of `kernels` and the timing of the emulated accelerator."""
        machine = self.machine
        rates = Roofline(machine.memory, machine.flops, machine.launch, machine.up, machine.down, machine.latency)
        return TimedKernels(kernels, self.compute, rates)

    def _lane(self, name: str) -> TimedLane:
        return TimedLane(name, self.clock, self.stretch_factor)
