"""The devices of a node: the host, its disk, and its accelerators."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from scheduler.free import default_budget
from scheduler.storage.disk import DirectDisk, Disk
from tpi.devices.abilities import check_model
from tpi.devices.base import Device
from tpi.devices.choose import open_devices
from tpi.devices.host import HostDevice, open_host
from tpi.devices.options import DeviceOptions, OffloadOptions
from tpi.devices.trial import find_accelerator
from tpi.errors import DeviceError, EmulationError, KernelError, PlanError, TpiError
from tpi.progress import Progress, warn
from tpi.text import NAME_CHARACTERS, plain
from worker.trial import calibrate_emulation, run_trial, warn_experimental, warn_left_out, watch

if TYPE_CHECKING:  # not imported at run time: commands that only name a device start faster
    from allreduce.base import Endpoints
    from scheduler.model.machine import NodeMachine
    from tpi.config import ModelConfig
    from tpi.devices.emulated.emulation import Emulation
    from tpi.net.fields import Card
    from tpi.net.messages import Assign
    from worker.node.node import Node
    from worker.plan.choose import Choose
    from worker.plan.fit import Tables
    from worker.shards.image import HeldBlock

_NO_LIMIT = 1 << 60  # bytes
INTERRUPTED = 0.02  # share of emulated tasks that may overrun, because the system interrupts a few
CPU, AUTO = "cpu", "auto"


@dataclass(frozen=True)
class AcceleratorSetup:
    """One or more accelerators, the options for their use, and the measured speeds of the machine that has them."""

    device: Device
    figures: "NodeMachine"
    options: OffloadOptions = field(default_factory=OffloadOptions)
    choose: "Choose | None" = None  # replaces `worker.plan.choose.choose`
    more: tuple[Device, ...] = ()  # further accelerators; `figures.more` has the speeds of each
    mark_doubted: Callable[[], None] | None = (
        None  # called if a run contradicts the figures; None if they were not measured
    )
    found_by_auto: bool = False  # True if `auto` found it: if it fails at the start, the host computes alone

    @property
    def devices(self) -> tuple[Device, ...]:
        """All accelerators of the machine, in the order of `figures.cards`."""
        return self.device, *self.more

    @property
    def machine(self) -> "NodeMachine":
        """The figures, with the memory that is free on the accelerators now."""
        rooms = [_room(device) for device in self.devices]
        first, *more = (replace(card, memory=room) for card, room in zip(self.figures.cards, rooms, strict=True))
        return replace(self.figures, accelerator=first, more=tuple(more))

    @property
    def card(self) -> "Card":
        """The description of the accelerators, as it is sent to the master."""
        from scheduler.model.nodefigures import card_figures
        from tpi.net.fields import Card

        used, (memory, *more) = self.options, (card.memory for card in self.machine.cards)
        return Card(
            plain(", ".join(device.name for device in self.devices), NAME_CHARACTERS),
            memory,
            used.weights,
            used.kv,
            used.pipeline,
            used.crossover or 0,
            tuple(more),
            card_figures(self.figures),
            self.figures.shared,
        )


def _room(device: Device) -> int:
    limit = device.memory.limit
    return (_NO_LIMIT if limit is None else limit) - device.memory.used


@dataclass(frozen=True)
class Equipment:
    """The devices of one process, for every node that it builds."""

    host: HostDevice
    accelerator: AcceleratorSetup | None = None
    disk: Disk | None = None  # None: the real disk
    emulation: "Emulation | None" = None  # keeps the time of all devices

    @property
    def card(self) -> "Card | None":
        """The description of the accelerators, as it is sent to the master; None without accelerators."""
        return None if self.accelerator is None else self.accelerator.card

    def build(
        self,
        assign: "Assign",
        held: "Sequence[HeldBlock]",
        endpoints: "Endpoints",
        progress: Progress,
        tables: "Tables | None" = None,
    ) -> "Node":
        """Build a node of these devices, with the arguments and errors of `worker.node.build.build_node`.

        If an accelerator that `auto` found fails in a trial run, a warning says so, and the node is built without it.
        """
        able = self.for_model(assign.config)
        try:
            return able._built(assign, held, endpoints, progress, tables)
        except Exception as error:
            others = isinstance(error, TpiError) and not isinstance(error, (DeviceError, KernelError, PlanError))
            if others or able.accelerator is None or not able.accelerator.found_by_auto:
                raise
            return able._without(error)._built(assign, held, endpoints, progress, tables)

    def for_model(self, config: "ModelConfig") -> "Equipment":
        """Return the equipment to use for the model `config`.

        If `auto` found an accelerator that cannot compute this model, print a warning and leave the accelerator out.
        """
        setup = self.accelerator
        if setup is None or not setup.found_by_auto:
            return self
        try:
            for device in setup.devices:
                check_model(device, config)
        except PlanError as error:
            return self._without(error)
        return self

    def without_failed(self, failure: TpiError) -> "Equipment | None":
        """Return the equipment to go on with after a step failed with `failure`.

        Return None unless an accelerator that `auto` found has failed. The accelerator stays open, so that the node
        that used it can be closed.
        """
        setup = self.accelerator
        of_device = isinstance(failure, (DeviceError, KernelError)) and not isinstance(failure, EmulationError)
        return self._without(failure) if of_device and setup is not None and setup.found_by_auto else None

    def _without(self, why: Exception) -> "Equipment":
        warn_left_out(why)
        return replace(self, accelerator=None)

    def _built(
        self,
        assign: "Assign",
        held: "Sequence[HeldBlock]",
        endpoints: "Endpoints",
        progress: Progress,
        tables: "Tables | None",
    ) -> "Node":
        from worker.node.build import build_node

        setup = self.accelerator
        node = build_node(assign, held, endpoints, progress, tables, self.disk, self.host, accelerator=setup)
        if setup is not None and setup.found_by_auto:
            run_trial(node, setup.devices)
        if self.emulation is not None:
            calibrate_emulation(self.emulation, node)
        if setup is not None and setup.mark_doubted is not None:
            watch(node, setup.mark_doubted)
        return node

    def close(self) -> None:
        """Close the accelerators; warn if the emulation could not keep its time."""
        for device in self.accelerator.devices if self.accelerator else ():
            device.close()
        try:
            if self.emulation is not None:
                self.emulation.check(INTERRUPTED)
        except EmulationError as error:
            warn(str(error))


@dataclass(frozen=True)
class MeasuredNode:
    """The measured speeds of this machine and its devices.

    Call `mark_doubted` if a run contradicts these speeds.
    """

    machine: "NodeMachine"
    mark_doubted: Callable[[], None]


Measure = Callable[[HostDevice, Sequence[Device]], MeasuredNode]


def measured(host: HostDevice, devices: Sequence[Device], cache: Path) -> MeasuredNode:
    """Return the speeds of this machine, its disk and `devices`, from `cache` or measured now.

    If there is no file to measure the disk with, the result has the speed of a laptop's disk.
    """
    from scheduler.model.machine import LAPTOP, NodeMachine
    from worker.measure.remembered import device_rates, doubt_machine
    from worker.measure.speed import disk_rate, host_rates_allowed
    from worker.plan.speeds import OF_MEMORY

    since = time.time()
    rates = host_rates_allowed(host.kernels, cache).figures
    card, *more = (device_rates(device, cache).figures for device in devices)
    disk, bus = disk_rate(cache) or LAPTOP.disk, rates.read / OF_MEMORY
    machine = NodeMachine(rates, default_budget(), disk, card, bus, tuple(more))
    return MeasuredNode(machine, partial(doubt_machine, cache, since))


def open_equipment(options: DeviceOptions, measure: Measure) -> Equipment:
    """Open the devices that the user asked for, and measure the real ones.

    `auto` opens one graphics chip if the machine has one. A plan then gives the chip the phases in which it is faster
    than the host, according to the measurement. If the chip cannot be measured, the host computes alone.

    Raises:
        UsageError: if a device is missing, if it has less memory than the flags ask for, or if there are flags about an
            accelerator but `auto` finds none.
        DeviceError, KernelError: if a device that was asked for by name, or by flags about one, cannot compute.
    """
    host = open_host()
    devices = _opened(options)
    if not devices:
        options.refuse_flags("this machine has none; name one with --device, or leave the flag out")
        return Equipment(host)
    emulations = [device.emulation for device in devices if isinstance(device, _Emulated)]
    if emulations:
        return _emulated(devices, emulations, host, options.offload)
    found = options.devices == (AUTO,) and not options.about_accelerator
    try:
        known = measure(host, devices)
    except Exception as error:
        for device in devices:
            device.close()
        if not found:
            raise
        warn_left_out(error)
        return Equipment(host)
    if not found:
        warn_experimental(devices)
    return Equipment(
        host,
        replace(
            _accelerator_setup(devices, known.machine, options.offload),
            mark_doubted=known.mark_doubted,
            found_by_auto=found,
        ),
    )


@runtime_checkable
class _Emulated(Protocol):
    """A device that runs in emulated time."""

    emulation: "Emulation"


def _opened(options: DeviceOptions) -> Sequence[Device]:
    (name, memory), *_ = options.limits
    if name == CPU:
        return ()
    if name == AUTO:
        found = find_accelerator(memory)
        return (found,) if found else ()
    return open_devices(options.limits)


def _accelerator_setup(devices: Sequence[Device], figures: "NodeMachine", options: OffloadOptions) -> AcceleratorSetup:
    first, *more = devices
    return AcceleratorSetup(first, figures, options, more=tuple(more))


def _emulated(
    devices: Sequence[Device], emulations: "Sequence[Emulation]", host: HostDevice, options: OffloadOptions
) -> Equipment:
    """Return equipment whose host, disk and accelerators all run in emulated time.

    `emulations` has the emulation of each of `devices`. The first one also emulates the host and the disk.
    """
    from scheduler.model.machine import emulated_node
    from scheduler.storage.timed import TimedDisk

    emulation = emulations[0]
    setup = _accelerator_setup(devices, emulated_node(*(each.machine for each in emulations)), options)
    return Equipment(emulation.host(host), setup, TimedDisk(DirectDisk(), emulation.disk), emulation)
