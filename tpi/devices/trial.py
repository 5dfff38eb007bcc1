"""What `--device auto` may take: a graphics chip that is here, found without loading what only one that is needs."""

from importlib.util import find_spec
from pathlib import Path

from tpi.devices.base import Device
from tpi.devices.choose import open_device
from tpi.errors import TpiError

_NVIDIA = Path("/proc/driver/nvidia/version")
_CHIPS = Path("/dev/dri")  # where Linux has the graphics chips that programs may compute on


def find_accelerator(limit: int | None = None) -> Device | None:
    """The first graphics chip that opens, with at most `limit` bytes of its memory; None if there is none.

    A processor that OpenCL offers as a device is none: the host's own kernels are faster on it.
    """
    opened = (_open(name, limit) for name in _candidates())
    return next((device for device in opened if device is not None), None)


def _open(name: str, limit: int | None) -> Device | None:
    try:
        return open_device(name, limit)
    except TpiError:  # nobody asked for this one
        return None


def _candidates() -> list[str]:
    found = []
    if _NVIDIA.exists() and find_spec("triton") is not None:
        found.append("cuda")
    if (_NVIDIA.exists() or any(_CHIPS.glob("renderD*"))) and find_spec("pyopencl") is not None:
        found += _opencl_chips()
    return found


def _opencl_chips() -> list[str]:
    from tpi.devices.opencl.discover import find_devices, is_gpu

    return [f"opencl:{index}" for index, device in enumerate(find_devices()) if is_gpu(device)]
