"""How much memory this process may take where the user did not say: what is free, less a margin."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tpi.system.memory import address_space, available_memory

_MARGIN = 256 << 20  # bytes of the machine left to other programs, at least
_GROUP_MARGIN = 12 << 20  # bytes left in a control group, at least: program files, and what the kernel keeps
_ADDRESSES = 384 << 20  # bytes of a limited address space that threads reserve: stacks, and heaps of their own
_SHARE = 10  # and one part in so many of what is free
_PROCESS = 28 << 20  # bytes of one more process, before it holds anything of a model
_GROUPS = Path("/sys/fs/cgroup")
_UNLIMITED = 1 << 60


@dataclass(frozen=True)
class _Files:
    """Where a version of the API says what.

    `inactive`, `active` and `mapped` are lines of memory.stat: file pages that are to go first, other file pages, and
    pages that a process has in its address space.
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

    That is an equal part of what is free on the machine, or in the tightest of this process's control groups, after a
    margin. A control group holds this program alone: its margin is small, and other processes are paid from the rest.
    """
    groups = _group_limits(_GROUPS, Path("/proc/self/cgroup"))
    free, addresses = less_margin(available_memory()) // (1 + others), address_space()
    if addresses is not None:
        free = min(free, max(0, addresses - _ADDRESSES))  # each process has a limit of its own
    return min([free, *(_part(each, others) for each in groups)])


def _part(free: int, others: int) -> int:
    """Return the part of each process of `free` bytes in a control group."""
    return max(0, free - max(_GROUP_MARGIN, free // _SHARE) - others * _PROCESS) // (1 + others)


def less_margin(free: int) -> int:
    """What of so many free bytes may be used."""
    return max(0, free - max(_MARGIN, free // _SHARE))


def _group_limits(root: Path, own: Path) -> Iterable[int]:
    """What is free in the memory control group of this process and in those above it; both versions of the API.

    File pages that no program runs from count as free: they are dropped when memory is asked for.
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
        return None  # no such file, or "max"


def _droppable(path: Path, files: _Files) -> int:
    """Return the bytes of file pages that a memory.stat says are in use for speed alone; 0 if it cannot be read."""
    try:
        fields = dict(line.split() for line in path.read_text().splitlines())
        inactive, active, mapped = (int(fields.get(name, 0)) for name in (files.inactive, files.active, files.mapped))
    except (OSError, ValueError):
        return 0
    return max(inactive, inactive + active - mapped)
