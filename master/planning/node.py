"""The machine that is planned for: described in words, emulated, or this one, measured."""

import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from scheduler.free import default_budget, less_margin
from scheduler.model.machine import LAPTOP, Accelerator, DiskRate, NodeMachine, emulated_node, parse_machine
from scheduler.storage.tune import disk_for
from tpi.devices.choose import open_device
from tpi.devices.emulated.machine import parse_emulated
from tpi.errors import PlanError, UsageError
from worker.plan.speeds import OF_DISK, OF_MEMORY

HOST_ONLY = (None, "auto", "cpu")
_EMULATED = "emu:"
_MIB = 1 << 20


@dataclass(frozen=True)
class NodeFlags:
    """What the command line says of the machine; sizes in bytes, None: as it is."""

    machine: str | None = None
    device: str | None = None
    memory: int | None = None
    gpu_memory: int | None = None
    remeasure: bool = False


@dataclass(frozen=True)
class PlannedNode:
    """A machine with the memory that may be used, and in words where its figures are from."""

    machine: NodeMachine
    told: str


def planned_node(flags: NodeFlags, cache: Path, files: Sequence[Path]) -> PlannedNode:
    """The machine of these flags; `files` are on the disk that would be read, if it is this machine's.

    Raises:
        UsageError: if a machine is described twice or wrongly, or a device is not there.
        PlanError: if more of the accelerator's memory is asked for than it has.
    """
    node = _node(flags, cache, files)
    machine = node.machine if flags.memory is None else replace(node.machine, memory=flags.memory)
    return replace(node, machine=replace(machine, accelerator=_limited(machine.accelerator, flags.gpu_memory)))


def _node(flags: NodeFlags, cache: Path, files: Sequence[Path]) -> PlannedNode:
    if flags.machine is not None:
        if flags.device is not None:
            raise UsageError("--machine and --device exclude each other; give one of them")
        return _roomy(parse_machine(flags.machine), "as described")
    if flags.device is not None and flags.device.startswith(_EMULATED):
        emulated = parse_emulated(flags.device.removeprefix(_EMULATED))
        return _roomy(emulated_node(emulated), f"as {emulated.name} emulates it")
    return _measured(flags, cache, files)


def _roomy(machine: NodeMachine, told: str) -> PlannedNode:
    """The system and others need some of the memory that a machine has."""
    return PlannedNode(replace(machine, memory=less_margin(machine.memory)), told)


def _measured(flags: NodeFlags, cache: Path, files: Sequence[Path]) -> PlannedNode:
    from tpi.devices.host import open_host
    from worker.measure.remembered import device_rates, host_rates

    host = host_rates(open_host().kernels, cache, flags.remeasure)
    device, names = None, [host.on]
    if flags.device not in HOST_ONLY:
        with closing(open_device(str(flags.device), flags.gpu_memory)) as opened:
            found = device_rates(opened, cache, flags.remeasure)
        device, names = found.figures, [host.on, found.on]
    disk = disk_for(files, cache).bytes_per_second
    if not disk:
        names.append("a laptop's disk, since nothing is here to measure this one by")
    rate = DiskRate(OF_DISK * disk) if disk else LAPTOP.disk
    machine = NodeMachine(host.figures, default_budget(), rate, device, host.figures.read / OF_MEMORY)
    return PlannedNode(machine, f"measured {_day(host.at)} on {' and '.join(names)}")


def _limited(device: Accelerator | None, limit: int | None) -> Accelerator | None:
    if limit is None:
        return device
    if device is None:
        raise UsageError("--gpu-memory goes with an accelerator, and this node has none; leave it out")
    if limit > device.memory:
        have = device.memory // _MIB
        raise PlanError(f"--gpu-memory {limit // _MIB}MiB is beyond what {device.name} has; give at most {have}MiB")
    return replace(device, memory=limit)


def _day(seconds: float) -> str:
    return time.strftime("%Y-%m-%d", time.localtime(seconds))
