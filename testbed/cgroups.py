"""CPU, memory and disk limits of the devices, with control groups of version 1 or 2, whichever the kernel has mounted.

Everything is a directory to make, files to write, and a directory to remove; nothing is remembered but the paths.
"""

import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tpi.errors import TestbedError
from tpi.topology.topology import Host

PERIOD_US = 5000  # short, so that a device of 0.2 core computes 1 ms in every 5 rather than 20 in every 100
_SMALLEST_QUOTA_US = 1000  # the kernel takes no less
CONTROLLERS = ("cpu", "memory", "blkio")
_FIRST = 30  # times the weight of others: an emulated machine does not wait for what else this host computes
_WEIGHTS = {"cpu.shares": 1024, "cpu.weight": 100}  # of a group by default, in version 1 and 2


@dataclass(frozen=True)
class Hierarchies:
    """Where each controller is. `unified` is the version 2 root if it has the controllers, else None."""

    version1: dict[str, Path]
    unified: Path | None = None

    def controllers(self) -> dict[str, str]:
        """Each controller that can be used, with "v1" or "v2"."""
        if self.unified is not None:
            return dict.fromkeys(CONTROLLERS, "v2")
        return {name: "v1" for name in CONTROLLERS if name in self.version1}


def find_hierarchies(mounts: str | None = None) -> Hierarchies:
    """Read the mount table (given as text in tests)."""
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
    """Microseconds of CPU time per period, and the period, that make a share of `cores`."""
    microseconds = round(cores * PERIOD_US)
    if microseconds >= _SMALLEST_QUOTA_US:
        return microseconds, PERIOD_US
    return _SMALLEST_QUOTA_US, min(round(_SMALLEST_QUOTA_US / cores), 1_000_000)


def block_devices() -> list[str]:
    """`major:minor` of every real disk of this machine."""
    found = []
    for disk in sorted(Path("/sys/block").glob("*")):
        if not disk.name.startswith(("loop", "ram", "zram", "sr", "fd")) and _words(disk / "size") not in ([], ["0"]):
            found += _words(disk / "dev")
    return found


def limits(device: Host, disks: list[str]) -> Iterator[tuple[str, str, str, str]]:
    """What to write for a device: controller, file in version 1, file in version 2, text (`v1|v2` if they differ)."""
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


_OPTIONAL = {"memory.memsw.limit_in_bytes", "memory.swap.max"}  # absent where the kernel does not account swap


def make_group(hierarchies: Hierarchies, name: str, device: Host, disks: list[str]) -> tuple[str, ...]:
    """Make and limit the group `name/<device>`; returns the directories for its processes to join.

    Raises:
        TestbedError: if a limit that the topology asks for cannot be set on this machine.
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
                f"device {device.name} limits {controller}, but this kernel has no such cgroup controller"
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
    """Have all devices together come before the host's other programs, where the kernel weighs groups.

    A device that gets no core for seconds is silent, as if it were cut off. Priorities of processes say nothing across
    groups.
    """
    for name, usual in _WEIGHTS.items():
        if (group / name).exists():
            with suppress(OSError):  # no more than a favour
                (group / name).write_text(str(_FIRST * usual))


def _write(file: Path, text: str, device: Host) -> None:
    try:
        file.write_text(text)
    except OSError as error:
        if file.name in _OPTIONAL and isinstance(error, FileNotFoundError | PermissionError):
            return
        raise TestbedError(f"the limits of device {device.name} cannot be set: {file}: {error.strerror}") from error


def rubbish(hierarchies: Hierarchies, name: str, devices: list[str]) -> tuple[str, ...]:
    """The directories that the group `name` leaves in all hierarchies, children first."""
    roots = [hierarchies.unified] if hierarchies.unified else list(hierarchies.version1.values())
    return tuple(str(root / name / child) for root in roots for child in (*devices, ""))


def remove_groups(folders: tuple[str, ...], patience: float = 2.0) -> list[str]:
    """Remove the directories, waiting while the kernel still counts ended processes in them; returns what is left."""
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
