"""The emulated accelerator as a device of a node: `--device emu:6GiB,link=2GB/s,host=0.25`."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from tpi.devices.arena import Arena
from tpi.devices.base import Event, Pending
from tpi.devices.emulated.emulation import Emulation
from tpi.devices.emulated.lane import TimedLink
from tpi.devices.emulated.machine import parse_emulated
from tpi.devices.emulated.thread import TimedThread
from tpi.devices.host import check_sizes, open_host
from tpi.devices.memorychecked import MemoryCheckedKernels
from tpi.devices.pages import Bytes, page_buffer
from tpi.errors import DeviceError, UsageError
from tpi.kernels import Kernels

T = TypeVar("T")


class EmulatedDevice:
    """The emulated accelerator as a device. Threads compute, copy up, copy down, and copy within its memory."""

    def __init__(self, emulation: Emulation, kernels: Kernels, limit: int | None = None) -> None:
        """Create the device; `kernels` compute on the host, and `limit` is in bytes (None: the machine's capacity)."""
        machine = emulation.machine
        self.name = machine.name
        self.emulation = emulation
        self.memory = Arena(self.name, machine.capacity if limit is None else limit)
        self.kernels: Kernels = emulation.accelerate(MemoryCheckedKernels(kernels, self.memory))
        self._computing, self._up, self._down, self._within = (
            TimedThread(f"{self.name}-{task}", emulation.clock) for task in ("compute", "up", "down", "within")
        )

    def copy(self, source: Bytes, target: Bytes) -> Event:
        """Start copying bytes between host and device memory, or within the device's; return an event for the end."""
        check_sizes(source, target)
        thread, link = self._way(source, target)
        return thread.start(lambda: link.move(source.size, lambda: np.copyto(target, source)))

    def transfer_activations(self, nbytes: int, up: bool) -> Event:
        """Start the transfer of `nbytes` bytes of activations over the link, and return an event for its end.

        `up` is True towards the device. The transfer waits for copies in its direction that were requested before it.
        """
        thread, link = (self._up, self.emulation.up) if up else (self._down, self.emulation.down)
        return thread.start(lambda: link.move(nbytes, lambda: None))  # its memory is the host's: nothing is copied

    def start(self, call: Callable[[], T]) -> Pending[T]:
        """Queue a call of this device's kernels behind the calls started before it. Return a pending operation."""
        return self._computing.start(call)

    def staging(self, size: int) -> Bytes:
        """Return `size` zeroed bytes of host memory that this device copies from and to at full speed."""
        return page_buffer(size)

    def close(self) -> None:
        """Wait until all started calls and copies have ended, then end the device's threads."""
        for thread in (self._computing, self._up, self._down, self._within):
            thread.close()

    def _way(self, source: Bytes, target: Bytes) -> tuple[TimedThread, TimedLink]:
        """Return the thread and the link that copy between the two arrays.

        Raises:
            DeviceError: if neither array is in the device's memory.
        """
        here, there = self.memory.owns(source), self.memory.owns(target)
        if here and there:
            return self._within, self.emulation.within
        if there:
            return self._up, self.emulation.up
        if here:
            return self._down, self.emulation.down
        raise DeviceError(f"one end of a copy must lie in the memory of {self.name}")


def open_emulated(argument: str, limit: int | None = None, same_node: Emulation | None = None) -> EmulatedDevice:
    """Return the accelerator that `argument` describes (`tpi.devices.emulated.machine`), with at most `limit` bytes.

    `same_node` is the emulation of another accelerator of the same node, or None.

    Raises:
        UsageError: if the description is wrong, or `limit` exceeds the capacity.
    """
    machine = parse_emulated(argument)
    if limit is not None and limit > machine.capacity:
        raise UsageError(
            f"emu:{argument} has {machine.capacity} bytes of memory, less than the limit of {limit}; "
            "give a smaller --gpu-memory, or emulate a larger device"
        )
    return EmulatedDevice(Emulation(machine, same_node), open_host().kernels, limit)


def open_emulated_devices(described: Sequence[tuple[str, int | None]]) -> tuple[EmulatedDevice, ...]:
    """Return the accelerators of one emulated node, each with its limit.

    The node's host, disk and stretch are those in the first description. A device without a name is numbered.

    Raises:
        UsageError: if a description is wrong, a limit exceeds the capacity, or two devices have the same name.
    """
    opened: list[EmulatedDevice] = []
    for number, (argument, limit) in enumerate(described, 1):
        name, taken = parse_emulated(argument).name, {device.name for device in opened}
        if name in taken:
            if f"name={name}" in argument:
                raise UsageError(f"two emulated devices are called {name}; give each another name=")
            argument += f",name={name}-{number}"
        opened.append(open_emulated(argument, limit, opened[0].emulation if opened else None))
    return tuple(opened)
