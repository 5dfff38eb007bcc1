"""What a node computes with: the host, its disk, and an accelerator beside it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from scheduler.free import default_budget
from scheduler.storage.disk import DirectDisk, Disk
from tpi.devices.base import Device
from tpi.devices.choose import open_device
from tpi.devices.host import HostDevice, open_host
from tpi.devices.options import DeviceOptions, OffloadOptions
from tpi.devices.trial import find_accelerator
from tpi.progress import Progress, warn
from tpi.text import NAME_CHARACTERS, plain

if TYPE_CHECKING:  # what is not needed by everybody who names a device
    from allreduce.base import Endpoints
    from scheduler.model.machine import NodeMachine
    from tpi.devices.emulated.emulation import Emulation
    from tpi.net.fields import Card
    from tpi.net.messages import Assign
    from worker.node.node import Node
    from worker.pipelines.decide import Decide
    from worker.plan.fit import Tables
    from worker.shards.image import HeldBlock

_NO_LIMIT = 1 << 60  # bytes
CPU, AUTO = "cpu", "auto"


@dataclass(frozen=True)
class Beside:
    """An accelerator, how it is to be used, and the figures of the machine that it is in."""

    device: Device
    figures: "NodeMachine"
    options: OffloadOptions = field(default_factory=OffloadOptions)
    decide: "Decide | None" = None  # in place of `worker.pipelines.decide.decide_accelerator`

    @property
    def machine(self) -> "NodeMachine":
        """The figures, with the memory that the accelerator has left now."""
        assert self.figures.accelerator is not None
        limit = self.device.memory.limit
        room = (_NO_LIMIT if limit is None else limit) - self.device.memory.used
        return replace(self.figures, accelerator=replace(self.figures.accelerator, memory=room))

    @property
    def card(self) -> "Card":
        """What others are told of it."""
        from tpi.net.fields import Card

        used, accelerator = self.options, self.machine.accelerator
        assert accelerator is not None
        return Card(
            plain(self.device.name, NAME_CHARACTERS),
            accelerator.memory,
            used.weights,
            used.kv,
            used.pipeline,
            used.crossover or 0,
        )


@dataclass(frozen=True)
class Equipment:
    """The devices of one process, for every node that it builds."""

    host: HostDevice
    accelerator: Beside | None = None
    disk: Disk | None = None  # None: the real one
    emulation: "Emulation | None" = None  # whose time all of it keeps

    @property
    def card(self) -> "Card | None":
        """What others are told of the accelerator."""
        return None if self.accelerator is None else self.accelerator.card

    def build(
        self,
        assign: "Assign",
        held: "Sequence[HeldBlock]",
        endpoints: "Endpoints",
        progress: Progress,
        tables: "Tables | None" = None,
    ) -> "Node":
        """A node of these devices. Arguments and errors as `worker.node.build.build_node`."""
        from worker.node.build import build_node

        node = build_node(assign, held, endpoints, progress, tables, self.disk, self.host, accelerator=self.accelerator)
        if self.emulation is not None:
            _settle(self.emulation, node)
        return node

    def close(self) -> None:
        """End the accelerator's threads."""
        if self.accelerator is not None:
            self.accelerator.device.close()


Measure = Callable[[HostDevice, Device], "NodeMachine"]
"""The figures of this machine with a device."""


def measured(host: HostDevice, device: Device, cache: Path) -> "NodeMachine":
    """What is remembered in `cache` of this machine and this device, or is measured now; the disk is a laptop's."""
    from scheduler.model.machine import LAPTOP, NodeMachine
    from worker.measure.remembered import device_rates, host_rates
    from worker.plan.speeds import OF_MEMORY

    rates, card = host_rates(host.kernels, cache).figures, device_rates(device, cache).figures
    return NodeMachine(rates, default_budget(), LAPTOP.disk, card, rates.read / OF_MEMORY)


def open_equipment(options: DeviceOptions, measure: Measure) -> Equipment:
    """The devices that the user asked for; what is real is measured, what is emulated has its figures with it.

    `auto` takes a graphics chip that is here. What it computes, if anything, its measured figures decide: a plan leaves
    to the host every phase in which the host is faster.

    Raises:
        UsageError: if a device is not there, or has less memory than it is to use.
    """
    host = open_host()
    if options.device == CPU:
        return Equipment(host)
    memory = options.gpu_memory
    device = find_accelerator(memory) if options.device == AUTO else open_device(options.device, memory)
    if device is None:
        return Equipment(host)
    emulation: Emulation | None = getattr(device, "emulation", None)
    if emulation is None:
        warn(f"{device.name} is experimental: such devices are tested on the CPU and have not been run on a card yet")
        return Equipment(host, Beside(device, measure(host, device), options.offload))
    return _emulated(device, emulation, host, options.offload)


def _emulated(device: Device, emulation: "Emulation", host: HostDevice, options: OffloadOptions) -> Equipment:
    """The whole node keeps the emulated time."""
    from scheduler.model.machine import emulated_node
    from scheduler.storage.timed import TimedDisk

    beside = Beside(device, emulated_node(emulation.machine), options)
    return Equipment(emulation.host(host), beside, TimedDisk(DirectDisk(), emulation.disk), emulation)


def _settle(emulation: "Emulation", node: "Node") -> None:
    """Find out by how much the emulation must be stretched, if nobody said so, and say it."""
    if not emulation.pace.settled:
        node.rehearse()
        emulation.calibrate()
    warn(f"this node is emulated, {emulation.stretch:.0f} times as slow as what it emulates (docs/emulation.md)")
