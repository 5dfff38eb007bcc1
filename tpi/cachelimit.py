"""How much a cache may hold: `--cache-limit`, of the master for all that it keeps, of a worker for its shards."""

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
    """Most bytes that a cache may hold; None: as many as it leaves free on its disk."""

    nbytes: int | None = None

    def allowed(self, held: int, free: int) -> int:
        """Bytes that may be held where `held` are now and the disk has `free` more."""
        return (held + free) // 2 if self.nbytes is None else self.nbytes

    def excess(self, directory: Path, held: int, needed: int = 0) -> int:
        """Bytes that have to go from `directory`, which holds `held`, before `needed` more may come; 0: none.

        What the disk has no room for has to go too.
        """
        free = disk_free(directory)
        return max(held + needed - self.allowed(held, free), needed - free, 0)


def cache_limit_option(command: Command) -> Command:
    """The flag `--cache-limit`, or `TPI_CACHE_LIMIT`, as a `CacheLimit`."""
    return click.option(
        "--cache-limit",
        metavar="SIZE",
        envvar="TPI_CACHE_LIMIT",
        callback=_parsed,
        help="Most bytes that the cache may hold, e.g. 20GiB; what can be made again goes first, least recently used "
        "(default: as much as it leaves free on its disk; else TPI_CACHE_LIMIT).",
    )(command)


def _parsed(ctx: click.Context, parameter: click.Parameter, value: str | None) -> CacheLimit:
    return CacheLimit(None if value is None else parse_size(value, "--cache-limit (or TPI_CACHE_LIMIT)"))
