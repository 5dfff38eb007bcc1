"""CPU, memory and disk limits of the devices, by control groups of version 1 or 2, whichever the kernel has mounted.

A limit is a file in a control group's directory. The testbed records the directories, to remove them.
"""

import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tpi.errors import TestbedError
from tpi.topology.topology import Host

PERIOD_US = 5000  # short, so that a device with 0.2 cores computes 1 ms in every 5 ms instead of 20 in every 100
_SMALLEST_QUOTA_US = 1000  # the kernel's minimum
CONTROLLERS = ("cpu", "memory", "blkio")
_FIRST = 30  # CPU weight of the devices relative to the default, so that they do not wait for the host's other programs
_WEIGHTS = {"cpu.shares": 1024, "cpu.weight": 100}  # default weight of a group, in version 1 and 2


@dataclass(frozen=True)
class Hierarchies:
    """Mount points of the controllers. `unified` is the root of version 2 if it has the controllers, else None."""

    version1: dict[str, Path]
    unified: Path | None = None

    def controllers(self) -> dict[str, str]:
        """Return the controllers that can be used, each with "v1" or "v2"."""
        if self.unified is not None:
            return dict.fromkeys(CONTROLLERS, "v2")
        return {name: "v1" for name in CONTROLLERS if name in self.version1}


def find_hierarchies(mounts: str | None = None) -> Hierarchies:
    """Return the mount points of the controllers, read from the text `mounts` or, if it is None, from /proc/mounts."""
    text = Path("/proc/mounts").read_text() if mounts is None else mounts
    version1: dict[str, Path] = {}
    unified = None
    for line in text.splitlines():
        _, folder, kind, options, *_ = line.split()
        if kind == "cgroup":
            version1 |= {name: Path(folder) for name in options.split(",") if name in CONTROLLERS}
        elif kind == "cgroup2" and {"cpu", "memory", "io"} <= set(_words(Path(folder, "cgroup.controllers"))):
            unified = Path(folder)
    return Hierarchies({} if unified else version1, unified)


def _words(file: Path) -> list[str]:
    try:
        return file.read_text().split()
    except OSError:
        return []


def quota(cores: float) -> tuple[int, int]:
    """Return the CPU time per period, and the period, that limit a group to `cores` cores. Both are in microseconds."""
    microseconds = round(cores * PERIOD_US)
    if microseconds >= _SMALLEST_QUOTA_US:
        return microseconds, PERIOD_US
    return _SMALLEST_QUOTA_US, min(round(_SMALLEST_QUOTA_US / cores), 1_000_000)


def block_devices() -> list[str]:
    """Return `major:minor` of every real disk of this machine."""
    found = []
    for disk in sorted(Path("/sys/block").glob("*")):
        if not disk.name.startswith(("loop", "ram", "zram", "sr", "fd")) and _words(disk / "size") not in ([], ["0"]):
            found += _words(disk / "dev")
    return found


def limits(device: Host, disks: list[str]) -> Iterator[tuple[str, str, str, str]]:
    """Yield the limits of a device: controller, file in version 1, file in version 2, and the text to write.

    A file is empty if its version has none for the limit. The text is `v1|v2` if the versions need different texts.
    """
    if device.cpu is not None:
        microseconds, period = quota(device.cpu)
        yield "cpu", "cpu.cfs_period_us", "", str(period)
        yield "cpu", "cpu.cfs_quota_us", "cpu.max", f"{microseconds}|{microseconds} {period}"
    if device.memory is not None:
        yield "memory", "memory.limit_in_bytes", "memory.max", str(device.memory)
        yield "memory", "memory.memsw.limit_in_bytes", "", str(device.memory)
        yield "memory", "", "memory.swap.max", "0"
    if device.disk is not None:
        rate = round(device.disk)
        for disk in disks:
            yield "blkio", "blkio.throttle.read_bps_device", "", f"{disk} {rate}"
            yield "blkio", "blkio.throttle.write_bps_device", "", f"{disk} {rate}"
            yield "blkio", "", "io.max", f"{disk} rbps={rate} wbps={rate}"


_OPTIONAL = {"memory.memsw.limit_in_bytes", "memory.swap.max"}  # absent if the kernel does not count swap


def make_group(hierarchies: Hierarchies, name: str, device: Host, disks: list[str]) -> tuple[str, ...]:
    """Create the control group `name/<device>` with its limits. Return the directories that its processes have to join.

    Raises:
        TestbedError: if a limit of the topology cannot be set on this machine.
    """
    if hierarchies.unified is not None:
        return (str(_make_unified(hierarchies.unified, name, device, disks)),)
    folders: dict[str, Path] = {}
    for controller, root in hierarchies.version1.items():
        folders[controller] = root / name / device.name
        folders[controller].mkdir(parents=True)
    for controller, file, _, text in limits(device, disks):
        if file and controller not in folders:
            raise TestbedError(
                f"device {device.name} limits {controller}, but this kernel has no cgroup controller for it; remove "
                "the limit from the topology, or mount the controller"
            )
        if file:
            _write(folders[controller] / file, text.partition("|")[0], device)
    for folder in folders.values():
        _come_first(folder.parent)
    return tuple(str(folder) for folder in folders.values())


def _make_unified(root: Path, name: str, device: Host, disks: list[str]) -> Path:
    folder = root / name / device.name
    folder.mkdir(parents=True)
    wanted = [(file, text) for _, _, file, text in limits(device, disks) if file]
    if wanted:
        for parent in (root, root / name):
            _write(parent / "cgroup.subtree_control", "+cpu +memory +io", device)
    for file, text in wanted:
        _write(folder / file, text.rpartition("|")[2], device)
    _come_first(folder.parent)
    return folder


def _come_first(group: Path) -> None:
    """Give the devices' group more CPU weight than the host's other programs, if the kernel supports weights.

    Without more weight, a device that gets no core for seconds would seem cut off. Priorities of processes do not help,
    because they have no effect across groups.
    """
    for name, usual in _WEIGHTS.items():
        if (group / name).exists():
            with suppress(OSError):  # not required
                (group / name).write_text(str(_FIRST * usual))


def _write(file: Path, text: str, device: Host) -> None:
    try:
        file.write_text(text)
    except OSError as error:
        if file.name in _OPTIONAL and isinstance(error, FileNotFoundError | PermissionError):
            return
        raise TestbedError(
            f"the limits of device {device.name} cannot be set: {file}: {error.strerror}; remove them from the topology"
        ) from error


def group_directories(hierarchies: Hierarchies, name: str, devices: list[str]) -> tuple[str, ...]:
    """Return the directories of the group `name` and its `devices` in all hierarchies, children first."""
    roots = [hierarchies.unified] if hierarchies.unified else list(hierarchies.version1.values())
    return tuple(str(root / name / child) for root in roots for child in (*devices, ""))


def remove_groups(folders: tuple[str, ...], patience: float = 2.0) -> list[str]:
    """Remove the directories `folders`, and return those that are left.

    For up to `patience` seconds, removal is tried again, because ended processes still count as members for a while.
    """
    deadline = time.monotonic() + patience
    left = list(folders)
    while True:
        left = [folder for folder in left if not _remove(folder)]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.01)


def _remove(folder: str) -> bool:
    try:
        Path(folder).rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True
