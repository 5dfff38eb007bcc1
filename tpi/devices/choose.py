"""Devices by the names that users give them: `opencl:0`, `cuda`, `emu:6GiB,link=2GB/s`."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from importlib import import_module
from typing import cast

from tpi.devices.base import Device
from tpi.devices.failures import explained
from tpi.errors import UsageError

Open = Callable[[str, int | None], Device]
"""Opens a device, given the text after the colon and a limit to its memory in bytes (None: all of it)."""

_EMULATED = "emu:"
_KINDS = {
    "opencl": "tpi.devices.opencl.device:open_opencl",
    "cuda": "tpi.devices.cuda.device:open_cuda",
    "emu": "tpi.devices.emulated.device:open_emulated",
}


def open_device(name: str, limit: int | None = None) -> Device:
    """Return the accelerator called `name`, with at most `limit` bytes of its memory.

    Raises:
        UsageError: if no device has this name, or it has less memory; lists the devices that exist.
        DeviceError: if its driver or a library fails.
    """
    kind, _, argument = name.partition(":")
    if kind not in _KINDS:
        raise UsageError(f"no device called {name!r}; choose cpu, auto, or one of {', '.join(_KINDS)}")
    module, _, function = _KINDS[kind].partition(":")
    with explained(f"{name} cannot be used", "choose another device, or --device cpu"):
        return cast(Open, getattr(import_module(module), function))(argument, limit)


def open_devices(named: Sequence[tuple[str, int | None]]) -> tuple[Device, ...]:
    """Return all accelerators of one node, each with its limit. Emulated ones share host, disk and clock.

    Raises:
        UsageError: if a device does not exist, has less memory than its limit, or is named twice.
    """
    if len(named) > 1 and all(name.startswith(_EMULATED) for name, _ in named):
        from tpi.devices.emulated.device import open_emulated_devices

        return open_emulated_devices([(name.removeprefix(_EMULATED), limit) for name, limit in named])
    with ExitStack() as stack:
        opened: list[Device] = []
        for name, limit in named:
            opened.append(open_device(name, limit))
            stack.callback(opened[-1].close)
            if opened[-1].name in {device.name for device in opened[:-1]}:
                raise UsageError(f"{opened[-1].name} is named twice; give each device once")
        stack.pop_all()
        return tuple(opened)
