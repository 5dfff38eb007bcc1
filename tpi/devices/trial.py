"""Find a graphics chip for `--device auto`, without loading what only a machine that has one needs.

A chip that was found never ends a run: whatever its driver or a library raises, it is left out with a warning. A driver
may also crash or hang, so that each chip is tried in a child process first (`tpi.devices.child`).
"""

from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from tpi.devices.base import Device
from tpi.devices.choose import open_device
from tpi.devices.failures import reason
from tpi.progress import warn

_NVIDIA = Path("/proc/driver/nvidia/version")
_CHIPS = Path("/dev/dri")  # where Linux has the graphics chips that programs may compute on


def find_accelerator(limit: int | None = None) -> Device | None:
    """Return the first graphics chip that works, with at most `limit` bytes of its memory; None if there is none.

    A processor that OpenCL offers as a device is not taken: the host's own kernels are faster on it.
    """
    opened = (_open(name, limit) for name in _candidates())
    return next((device for device in opened if device is not None), None)


def _open(name: str, limit: int | None) -> Device | None:
    from tpi.devices.child import try_chip  # loads what only machines with a chip need

    try:
        try_chip(name)
        return open_device(name, limit)
    except Exception as error:  # noqa: BLE001 - the user did not ask for this chip
        _leave_out(name, error)
        return None


def _leave_out(chip: str, error: Exception) -> None:
    warn(f"the graphics chip that was found, {chip}, is not used: {reason(error).partition(';')[0]}")


def _candidates() -> list[str]:
    """Names of the graphics chips that may be tried."""
    nvidia = _there(_NVIDIA)
    found = ["cuda"] if nvidia and _installed("triton") else []
    if (nvidia or _there(_CHIPS)) and _installed("pyopencl"):
        from tpi.devices.child import list_chips

        try:
            found += list_chips()
        except Exception as error:  # noqa: BLE001 - see `_open`
            _leave_out("opencl", error)
    return found


def _there(path: Path) -> bool:
    """Return whether a driver's file is here, or a folder of chips has one that computes."""
    with suppress(OSError):
        return any(path.glob("renderD*")) if path == _CHIPS else path.exists()
    return False


def _installed(library: str) -> bool:
    with suppress(ImportError, ValueError):
        return find_spec(library) is not None
    return False
