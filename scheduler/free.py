"""The default for `--memory`: the memory that is free when the process starts, less a margin."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tpi.system.memory import address_space, available_memory

_MARGIN = 256 << 20  # bytes of the machine left to other programs, at least
_GROUP_MARGIN = 12 << 20  # bytes left in a control group, at least: program files, and the kernel's own needs
_ADDRESSES = 384 << 20  # bytes of a limited address space that threads reserve for stacks and heaps
_SHARE = 10  # a margin is at least one part in so many of the free bytes
_PROCESS = 28 << 20  # bytes of one more process, before it holds any part of a model
_GROUPS = Path("/sys/fs/cgroup")
_UNLIMITED = 1 << 60


@dataclass(frozen=True)
class _Files:
    """Names of a control group's files, and of the lines in its memory.stat, in one version of the API.

    Attributes:
        limit: the file with the group's limit.
        usage: the file with the bytes in use.
        inactive: the line with the bytes of file pages that the kernel drops first.
        active: the line with the bytes of all other file pages.
        mapped: the line with the bytes of file pages that a process has in its address space.
    """

    limit: str
    usage: str
    inactive: str
    active: str
    mapped: str


_V1 = _Files(
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    "total_inactive_file",
    "total_active_file",
    "total_mapped_file",
)
_V2 = _Files("memory.max", "memory.current", "inactive_file", "active_file", "file_mapped")


def default_budget(others: int = 0) -> int:
    """Return the bytes that this process, and each of `others` that it is about to start, may use for a model.

    Free memory is that of the machine or, if it is less, of one of this process's control groups. Each process gets an
    equal part of it, less a margin. The margin in a control group is small, because the group holds this program alone;
    there the fixed cost of each other process is subtracted too.
    """
    groups = _group_limits(_GROUPS, Path("/proc/self/cgroup"))
    free, addresses = less_margin(available_memory()) // (1 + others), address_space()
    if addresses is not None:
        free = min(free, max(0, addresses - _ADDRESSES))  # each process has a limit of its own
    return min([free, *(_part(each, others) for each in groups)])


def _part(free: int, others: int) -> int:
    return max(0, free - max(_GROUP_MARGIN, free // _SHARE) - others * _PROCESS) // (1 + others)


def less_margin(free: int) -> int:
    """Return how many of `free` bytes may be used: all except 256 MiB or a tenth, whichever is more."""
    return max(0, free - max(_MARGIN, free // _SHARE))


def _group_limits(root: Path, own: Path) -> Iterable[int]:
    """Yield the free bytes of this process's memory control group and of each group above it, in either API version.

    Groups without a limit are left out. File pages that no process has mapped count as free: the kernel drops them when
    memory is needed.

    Args:
        root: where control groups are mounted.
        own: the file that names the process's groups.
    """
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, name = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        tree = root / controllers
        files = _V1 if controllers else _V2
        group = tree / name.lstrip("/")
        for folder in (group, *group.parents):
            limit, usage = _number(folder / files.limit), _number(folder / files.usage)
            if limit is not None and usage is not None and limit < _UNLIMITED:
                yield max(0, limit - max(0, usage - _droppable(folder / "memory.stat", files)))
            if folder == tree:
                break


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None  # there is no such file, or it says "max"


def _droppable(path: Path, files: _Files) -> int:
    """Return the bytes of file pages in a memory.stat that the kernel can drop; 0 if it cannot be read."""
    try:
        fields = dict(line.split() for line in path.read_text().splitlines())
        inactive, active, mapped = (int(fields.get(name, 0)) for name in (files.inactive, files.active, files.mapped))
    except (OSError, ValueError):
        return 0
    return max(inactive, inactive + active - mapped)
