"""The machine to plan for: described in words, emulated, or this one, measured."""

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from scheduler.free import default_budget, less_margin
from scheduler.model.machine import LAPTOP, Accelerator, DiskRate, NodeMachine, emulated_node, parse_machine
from scheduler.storage.tune import disk_for
from tpi.devices.base import Device
from tpi.devices.choose import open_devices
from tpi.devices.emulated.machine import parse_emulated
from tpi.devices.trial import find_accelerator
from tpi.errors import PlanError, UsageError
from worker.measure.remembered import Remembered, device_rates
from worker.plan.speeds import OF_DISK, OF_MEMORY
from worker.trial import warn_left_out

AUTO = "auto"
HOST_ONLY: tuple[tuple[str, ...], ...] = ((), ("cpu",))
_EMULATED = "emu:"
_MIB = 1 << 20


@dataclass(frozen=True)
class NodeFlags:
    """The flags that describe the machine. Sizes are in bytes; None: the machine's own."""

    machine: str | None = None
    devices: tuple[str, ...] = ()
    memory: int | None = None
    gpu_memory: tuple[int, ...] = ()  # bytes for each of `devices`, or one number for all of them
    remeasure: bool = False
    threads: int = 0  # compute threads; 0: all cores


@dataclass(frozen=True)
class PlannedNode:
    """A machine and the memory that may be used; `origin` is a phrase that says where its figures come from."""

    machine: NodeMachine
    origin: str


def planned_node(flags: NodeFlags, cache: Path, files: Sequence[Path]) -> PlannedNode:
    """Return the machine that the flags describe; `files` are on the disk that this machine would read.

    Raises:
        UsageError: if a machine is described twice or wrongly, or a device does not exist.
        PlanError: if more memory is asked for than a described machine or the accelerator has.
    """
    node = _node(flags, cache, files)
    machine = node.machine if flags.memory is None else replace(node.machine, memory=flags.memory)
    return replace(node, machine=_limited(machine, flags.gpu_memory))


def _node(flags: NodeFlags, cache: Path, files: Sequence[Path]) -> PlannedNode:
    if flags.machine is not None:
        if flags.devices:
            raise UsageError("--machine and --device exclude each other; give one of them")
        return _roomy(parse_machine(flags.machine), "as described", flags.memory)
    if flags.devices and all(name.startswith(_EMULATED) for name in flags.devices):
        emulated = [parse_emulated(name.removeprefix(_EMULATED)) for name in flags.devices]
        return _roomy(emulated_node(*emulated), f"as {emulated[0].name} emulates it", flags.memory)
    return _measured(flags, cache, files)


def _roomy(machine: NodeMachine, origin: str, asked: int | None) -> PlannedNode:
    """Return a described machine with the memory that the system and other programs leave.

    Raises:
        PlanError: if more memory is `asked` for, in bytes, than the machine has.
    """
    if asked is not None and asked > machine.memory:
        have = machine.memory // _MIB
        raise PlanError(f"--memory {asked // _MIB}MiB is beyond what this machine has; give at most {have}MiB")
    return PlannedNode(replace(machine, memory=less_margin(machine.memory)), origin)


def _measured(flags: NodeFlags, cache: Path, files: Sequence[Path]) -> PlannedNode:
    from tpi.devices.host import open_host
    from worker.measure.speed import host_rates_allowed

    kernels = open_host().kernels
    kernels.set_threads(flags.threads or kernels.threads())
    host = host_rates_allowed(kernels, cache, flags.remeasure)
    with ExitStack() as stack:
        opened = _opened(flags)
        for each in opened:
            stack.callback(each.close)
        found = _rates(opened, flags, cache)
    names = [host.on, *(each.on for each in found)]
    if flags.devices == (AUTO,) and not found:
        names.append("no graphics chip was found")
    disk = disk_for(files, cache).bytes_per_second
    if not disk:
        names.append("a laptop's disk, since there is no file to measure this one")
    rate = DiskRate(OF_DISK * disk) if disk else LAPTOP.disk
    cards, bus = [each.figures for each in found], host.figures.read / OF_MEMORY
    first = cards[0] if cards else None
    machine = NodeMachine(host.figures, default_budget(), rate, first, bus, tuple(cards[1:]))
    return PlannedNode(machine, f"measured {_day(host.at)} on {' and '.join(names)}")


def _rates(devices: Sequence[Device], flags: NodeFlags, cache: Path) -> list[Remembered[Accelerator]]:
    """Return the figures of the accelerators; if an accelerator that `auto` found fails, warn and return none."""
    try:
        return [device_rates(each, cache, flags.remeasure) for each in devices]
    except Exception as error:
        if flags.devices != (AUTO,) or flags.gpu_memory:
            raise
        warn_left_out(error)
        return []


def _opened(flags: NodeFlags) -> Sequence[Device]:
    if flags.devices in HOST_ONLY:
        return ()
    if flags.devices == (AUTO,):
        found = find_accelerator()
        return (found,) if found else ()
    return open_devices([(name, None) for name in flags.devices])


def _limited(machine: NodeMachine, limits: tuple[int, ...]) -> NodeMachine:
    if not limits:
        return machine
    if not machine.cards:
        raise UsageError("--gpu-memory goes with an accelerator, and this node has none; leave --gpu-memory out")
    every = limits if len(limits) > 1 else limits * len(machine.cards)
    first, *more = (_with_limit(card, limit) for card, limit in zip(machine.cards, every, strict=True))
    return replace(machine, accelerator=first, more=tuple(more))


def _with_limit(device: Accelerator, limit: int) -> Accelerator:
    if limit > device.memory:
        have = device.memory // _MIB
        raise PlanError(f"--gpu-memory {limit // _MIB}MiB is beyond what {device.name} has; give at most {have}MiB")
    return replace(device, memory=limit)


def _day(seconds: float) -> str:
    return time.strftime("%Y-%m-%d", time.localtime(seconds))
