"""Devices by the names that people give them: `opencl:0`, `cuda`, `emu:6GiB,link=2GB/s`."""

from collections.abc import Callable
from importlib import import_module
from typing import cast

from tpi.devices.base import Device
from tpi.errors import UsageError

Open = Callable[[str, int | None], Device]
"""Opens a device from what follows the colon, with a limit to its memory in bytes (None: what it has)."""

_KINDS = {
    "opencl": "tpi.devices.opencl.device:open_opencl",
    "cuda": "tpi.devices.cuda.device:open_cuda",
    "emu": "tpi.devices.emulated.device:open_emulated",
}


def open_device(name: str, limit: int | None = None) -> Device:
    """The accelerator called `name`, with at most `limit` bytes of its memory.

    Raises:
        UsageError: if there is none of this name here, or it has less memory; says which there are.
    """
    kind, _, argument = name.partition(":")
    if kind not in _KINDS:
        raise UsageError(f"no device called {name!r}; choose cpu, auto, or one of {', '.join(_KINDS)}")
    module, _, function = _KINDS[kind].partition(":")
    return cast(Open, getattr(import_module(module), function))(argument, limit)
