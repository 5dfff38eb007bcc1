"""What a node computes with: the host, its disk, and an accelerator beside it."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from scheduler.storage.disk import DirectDisk, Disk
from tpi.devices.base import Device
from tpi.devices.choose import open_device
from tpi.devices.host import HostDevice, open_host
from tpi.offloading import DeviceOptions, OffloadOptions

if TYPE_CHECKING:  # a node without accelerator has no use for what they bring
    from scheduler.model.machine import NodeMachine
    from tpi.devices.emulated.emulation import Emulation

_NO_LIMIT = 1 << 60  # bytes
CPU = "cpu"


@dataclass(frozen=True)
class Beside:
    """An accelerator, how it is to be used, and the figures of the machine that it is in."""

    device: Device
    figures: "NodeMachine"
    options: OffloadOptions = field(default_factory=OffloadOptions)

    @property
    def machine(self) -> "NodeMachine":
        """The figures, with the memory that the accelerator has left now."""
        assert self.figures.accelerator is not None
        limit = self.device.memory.limit
        room = (_NO_LIMIT if limit is None else limit) - self.device.memory.used
        return replace(self.figures, accelerator=replace(self.figures.accelerator, memory=room))


@dataclass(frozen=True)
class Equipment:
    """The devices of one process, for every node that it builds."""

    host: HostDevice
    accelerator: Beside | None = None
    disk: Disk | None = None  # None: the real one
    emulation: "Emulation | None" = None  # whose time all of it keeps

    def close(self) -> None:
        """End the accelerator's threads."""
        if self.accelerator is not None:
            self.accelerator.device.close()


Measure = Callable[[HostDevice, Device], "NodeMachine"]
"""The figures of this machine with a device."""


def open_equipment(options: DeviceOptions, measure: Measure) -> Equipment:
    """The devices that the user asked for; what is real is measured, what is emulated has its figures with it.

    Raises:
        UsageError: if a device is not there, or has less memory than it is to use.
    """
    host = open_host()
    if options.device in (CPU, "auto"):
        return Equipment(host)
    device = open_device(options.device, options.gpu_memory)
    emulation: Emulation | None = getattr(device, "emulation", None)
    if emulation is None:
        return Equipment(host, Beside(device, measure(host, device), options.offload))
    return _emulated(device, emulation, host, options.offload)


def _emulated(device: Device, emulation: "Emulation", host: HostDevice, options: OffloadOptions) -> Equipment:
    """The whole node keeps the emulated time."""
    from scheduler.model.machine import emulated_node
    from scheduler.storage.timed import TimedDisk

    beside = Beside(device, emulated_node(emulation.machine), options)
    return Equipment(emulation.host(host), beside, TimedDisk(DirectDisk(), emulation.disk), emulation)
