"""The OpenCL devices of this machine, and the one that a user names."""

from contextlib import suppress
from typing import Any

from tpi.devices.failures import reason
from tpi.errors import UsageError

_INSTALL = "OpenCL devices need pyopencl: install it with `pip install 'tpi[opencl]'`"


def opencl() -> Any:
    """Return the module pyopencl.

    Raises:
        UsageError: if it is not installed, or finds no OpenCL library.
    """
    try:
        import pyopencl
    except (ImportError, OSError) as error:  # OSError: a library that it loads is broken
        raise UsageError(f"{_INSTALL} ({reason(error)})") from error
    return pyopencl


def find_devices() -> list[Any]:
    """Return every `pyopencl.Device` of every platform; `opencl:INDEX` is an index into this list.

    Raises:
        UsageError: if pyopencl is missing.
    """
    cl = opencl()
    try:
        platforms = cl.get_platforms()
    except cl.Error:  # there is no platform
        return []
    return [device for platform in platforms for device in _of(platform)]


def choose_device(argument: str) -> tuple[int, Any]:
    """Return the device with index `argument`, and the index; if empty, the first GPU, or the first device without one.

    Raises:
        UsageError: if there is no such device; lists the devices that exist.
    """
    devices = find_devices()
    if not devices:
        raise UsageError("no OpenCL device was found: install the OpenCL driver of your graphics chip")
    if not argument:
        gpus = [index for index, device in enumerate(devices) if is_gpu(device)]
        index = gpus[0] if gpus else 0
        return index, devices[index]
    if not (argument.isdecimal() and int(argument) < len(devices)):
        there = ", ".join(f"opencl:{index} ({device.name.strip()})" for index, device in enumerate(devices))
        raise UsageError(f"there is no device opencl:{argument}; choose one of {there}")
    return int(argument), devices[int(argument)]


def is_gpu(device: Any) -> bool:
    """Return True if an OpenCL device is a graphics chip."""
    return bool(device.type & opencl().device_type.GPU)


def identity(device: Any) -> str:
    """Return a device's model, vendor and driver, and its UUID or bus address if an extension reports one.

    Devices without either are numbered among devices of the same model.
    """
    known = _model(device)
    where = " ".join(filter(None, (_told(device, name) for name in _PLACES)))
    if not where:
        like = [each for each in find_devices() if _model(each) == known]
        where = f"number {like.index(device) if device in like else 0}"
    return f"{known}, {where}"


_MODEL = ("name", "vendor", "version", "driver_version", "max_compute_units", "global_mem_size")
_PLACES = ("uuid_khr", "pci_bus_info_khr", "pci_domain_id_nv", "pci_bus_id_nv", "pci_slot_id_nv", "topology_amd")


def _model(device: Any) -> str:
    return ", ".join(" ".join(str(getattr(device, name)).split()) for name in _MODEL)


def _told(device: Any, name: str) -> str:
    """Return an attribute of a device as text, or "" if the device or pyopencl does not support the attribute."""
    with suppress(Exception):
        value = getattr(device, name)
        if isinstance(value, bytes):
            return value.hex()
        if isinstance(value, (int, str)):
            return f"{name} {value}"
        parts = [str(getattr(value, part)) for part in ("domain", "bus", "device", "function") if hasattr(value, part)]
        if parts or isinstance(value, (list, tuple)):
            return f"{name} {':'.join(parts or map(str, value))}"
    return ""


def _of(platform: Any) -> list[Any]:
    cl = opencl()
    try:
        return list(platform.get_devices())
    except cl.Error:  # a driver without a device
        return []
