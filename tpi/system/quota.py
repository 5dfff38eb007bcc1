"""CPU quota of the process, as set by containers and the testbed."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from tpi.system.machine import usable_cores

_GROUPS = Path("/sys/fs/cgroup")


def allowed_cores(root: Path = _GROUPS, own: Path = Path("/proc/self/cgroup")) -> float:
    """Return how many cores this process may keep busy: those it may run on, within the quotas of its control groups.

    `root` is the mount point of the control groups; the file `own` names those of this process.
    """
    return min([float(usable_cores()), *_quotas(root, own)])


def _quotas(root: Path, own: Path) -> Iterator[float]:
    """Yield the number of cores that each control group of this process, and each parent of one, allows.

    Both versions of the kernel's interface are read.
    """
    with suppress(OSError):
        for line in own.read_text().splitlines():
            _, controllers, name = line.split(":", 2)
            names = controllers.split(",")
            if controllers and "cpu" not in names:
                continue
            tree = root / ("cpu" if controllers else "")
            group = tree / name.lstrip("/")
            for folder in (group, *group.parents):
                if (cores := _cores(folder)) is not None:
                    yield cores
                if folder == tree:
                    break


def _cores(folder: Path) -> float | None:
    """Return the number of cores that one control group allows, or None if the group has no limit."""
    with suppress(OSError, ValueError):
        quota, period = (folder / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    with suppress(OSError, ValueError):
        quota_us = int((folder / "cpu.cfs_quota_us").read_text())
        return quota_us / int((folder / "cpu.cfs_period_us").read_text()) if quota_us > 0 else None
    return None
