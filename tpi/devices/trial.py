"""The search for a graphics chip for `--device auto`, which imports a chip's libraries only if the machine has one.

A chip never ends a run: if its driver or a library fails, it is left out with a warning. Since a driver may also crash
or hang, each chip is first tried in a child process (`tpi.devices.child`).
"""

from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from tpi.devices.base import Device
from tpi.devices.choose import open_device
from tpi.devices.failures import reason
from tpi.progress import warn

_NVIDIA = Path("/proc/driver/nvidia/version")
_CHIPS = Path("/dev/dri")  # where Linux lists graphics chips that can compute


def find_accelerator(limit: int | None = None) -> Device | None:
    """Return the first graphics chip that works, with at most `limit` bytes of its memory; None if there is none.

    A CPU that OpenCL offers as a device is not used: the host's own kernels are faster.
    """
    opened = (_open(name, limit) for name in _candidates())
    return next((device for device in opened if device is not None), None)


def _open(name: str, limit: int | None) -> Device | None:
    from tpi.devices.child import try_chip  # imports that only machines with a chip need

    try:
        try_chip(name)
        return open_device(name, limit)
    except Exception as error:  # noqa: BLE001 - the user did not ask for this chip
        _leave_out(name, error)
        return None


def _leave_out(chip: str, error: Exception) -> None:
    warn(f"graphics chip {chip} was found but is not used: {reason(error).partition(';')[0]}")


def _candidates() -> list[str]:
    """Return the names of the graphics chips to try."""
    nvidia = _there(_NVIDIA)
    found = ["cuda"] if nvidia and _installed("triton") else []
    if (nvidia or _there(_CHIPS)) and _installed("pyopencl"):
        from tpi.devices.child import list_chips

        try:
            found += list_chips()
        except Exception as error:  # noqa: BLE001 - the user did not ask for OpenCL
            _leave_out("opencl", error)
    return found


def _there(path: Path) -> bool:
    """Return True if `path` is an existing driver file, or a directory that lists a chip that can compute."""
    with suppress(OSError):
        return any(path.glob("renderD*")) if path == _CHIPS else path.exists()
    return False


def _installed(library: str) -> bool:
    with suppress(ImportError, ValueError):
        return find_spec(library) is not None
    return False
