"""The option `--cache-limit`: the size of a master's whole cache, or of a worker's cache of shards."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click

from tpi.config import parse_size
from tpi.system.machine import disk_free

Command = TypeVar("Command", bound=Callable[..., Any])


@dataclass(frozen=True)
class CacheLimit:
    """Largest number of bytes that a cache may hold. None: half of the disk space that is free without the cache."""

    nbytes: int | None = None

    def allowed(self, held: int, free: int) -> int:
        """Return the bytes that the cache may hold if it now holds `held` bytes and the disk has `free` more."""
        return (held + free) // 2 if self.nbytes is None else self.nbytes

    def excess(self, directory: Path, held: int, needed: int = 0) -> int:
        """Return the bytes to delete from `directory`, which holds `held`, before `needed` more are stored; 0 if none.

        The result is large enough to keep within the limit, and to make room on the disk.
        """
        free = disk_free(directory)
        return max(held + needed - self.allowed(held, free), needed - free, 0)


def cache_limit_option(command: Command) -> Command:
    """Add the flag `--cache-limit`, or `TPI_CACHE_LIMIT`, to a command. Its value is a `CacheLimit`."""
    return click.option(
        "--cache-limit",
        metavar="SIZE",
        envvar="TPI_CACHE_LIMIT",
        callback=_parsed,
        help="Most bytes that the cache may hold, e.g. 20GiB. Entries that can be created again are deleted first, the "
        "least recently used before others (default: TPI_CACHE_LIMIT, else as much as stays free on the disk).",
    )(command)


def _parsed(ctx: click.Context, parameter: click.Parameter, value: str | None) -> CacheLimit:
    return CacheLimit(None if value is None else parse_size(value, "--cache-limit (or TPI_CACHE_LIMIT)"))
