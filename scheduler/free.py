"""How much memory this process may take where the user did not say: what is free, less a margin."""

from collections.abc import Iterable
from pathlib import Path

import psutil

_MARGIN = 256 << 20  # bytes left to others, at least
_SHARE = 10  # and one part in so many of what is free
_GROUPS = Path("/sys/fs/cgroup")
_UNLIMITED = 1 << 60


def default_budget() -> int:
    """Bytes: the least of what the machine and each of this process's control groups have free, less a margin."""
    free = min([psutil.virtual_memory().available, *_group_limits(_GROUPS, Path("/proc/self/cgroup"))])
    return max(0, free - max(_MARGIN, free // _SHARE))


def _group_limits(root: Path, own: Path) -> Iterable[int]:
    """What is free in the memory control group of this process and in those above it; both versions of the API."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, name = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        tree = root / controllers
        files = ("memory.limit_in_bytes", "memory.usage_in_bytes") if controllers else ("memory.max", "memory.current")
        group = tree / name.lstrip("/")
        for folder in (group, *group.parents):
            limit, usage = (_number(folder / file) for file in files)
            if limit is not None and usage is not None and limit < _UNLIMITED:
                yield max(0, limit - usage)
            if folder == tree:
                break


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None  # no such file, or "max"
