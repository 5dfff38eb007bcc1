"""The commands `tpi ls` and `tpi rm`, which list and remove the contents of this machine's cache."""

import json
import sys
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import click

from tpi.cachelimit import CacheLimit, cache_limit_option
from tpi.config import default_cache
from tpi.errors import TpiError, UsageError, WeightsError
from tpi.pack.library.inventory import Entry
from tpi.paths import DIRECTORY
from worker.shards.inventory import discard, entries

_CACHE = click.option("--cache", type=DIRECTORY, help="The cache to use (default: ~/.cache/tpi).")
_AGES = ((86400, "d"), (3600, "h"), (60, "min"))


@click.command()
@_CACHE
@cache_limit_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def ls(cache: Path | None, cache_limit: CacheLimit, as_json: bool) -> None:
    """List the models, packs and shards in the cache, with their sizes and when each was last used."""
    directory = cache or default_cache()
    found = sorted(entries(directory), key=lambda entry: -entry.last_used)
    total = sum(entry.nbytes for entry in found)
    if as_json:
        fields = {"cache": str(directory), "bytes": total, "limit_bytes": cache_limit.nbytes}
        click.echo(json.dumps(fields | {"entries": [_fields(entry) for entry in found]}))
        return
    width = max([len(entry.name) for entry in found], default=0)
    for entry in found:
        click.echo(f"{entry.kind:<6}  {entry.name:<{width}}  {_size(entry.nbytes):>8}  {_age(entry):>9}{_notes(entry)}")
    limit = f" of {_size(cache_limit.nbytes)}" if cache_limit.nbytes is not None else ""
    click.echo(f"{_size(total)}{limit} in {directory}")


@click.command()
@click.argument("names", nargs=-1, metavar="[NAME]...")
@_CACHE
@click.option("--shards", is_flag=True, help="Remove the shards of all models.")
@click.option("--all", "everything", is_flag=True, help="Remove everything that can be made or downloaded again.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
def rm(names: tuple[str, ...], cache: Path | None, shards: bool, everything: bool, yes: bool) -> None:
    """Remove models, packs and shards by NAME.

    A NAME is one that `tpi ls` shows, with or without its hash. The name of a model removes everything made from it.
    A pack whose source file is gone is removed only if it is named. Files that a running process uses stay.
    """
    directory = cache or default_cache()
    if not names and not shards and not everything:
        raise UsageError("no entries to remove are named; give names that `tpi ls` shows, --shards or --all")
    found = entries(directory)
    named = _named(names, found, directory)
    chosen = [entry for entry in found if entry in named or (shards and entry.kind == "shards")
              or (everything and entry.reproducible)]  # fmt: skip
    if chosen and not yes and _is_interactive():
        listed = ", ".join(f"{entry.kind} {entry.name}" for entry in chosen)
        click.confirm(f"Remove {listed} ({_size(sum(entry.nbytes for entry in chosen))})?", abort=True, err=True)
    shards_first = sorted(chosen, key=lambda entry: entry.kind != "shards")  # shards take their names from packs
    busy = [entry for entry in shards_first if not _discarded(entry)]
    gone = sum(entry.nbytes for entry in chosen if entry not in busy)
    click.echo(f"removed {len(chosen) - len(busy)} of {len(chosen)}, {_size(gone)}")
    if everything and (kept := [entry.name for entry in found if entry not in chosen]):
        click.echo(f"tpi: kept {', '.join(kept)}: the source files are gone; name a pack to remove it too", err=True)
    if busy:
        raise TpiError(f"{', '.join(entry.name for entry in busy)}: in use by a running process; end it and try again")


def _is_interactive() -> bool:
    return sys.stdin.isatty()


def _named(names: Sequence[str], found: Sequence[Entry], directory: Path) -> list[Entry]:
    """Return the entries of `found` that the user gave as `names`.

    Raises:
        UsageError: if no entry has one of the names; the message lists similar names.
    """
    chosen: list[Entry] = []
    for name in names:
        meant = [entry for entry in found if entry.matches(name)]
        if not meant:
            known = sorted({entry.name for entry in found})
            near = [one for one in known if name and name.lower() in one.lower()] or get_close_matches(name, known)
            hint = f"similar names: {', '.join(near)}" if near else "`tpi ls` lists the names"
            raise UsageError(f"nothing in {directory} is called {name!r}; {hint}")
        chosen += meant
    return chosen


def _discarded(entry: Entry) -> bool:
    try:
        return discard(entry)
    except OSError as error:
        raise WeightsError(f"cannot remove {entry.path}: {error.strerror}; check its owner and permissions") from error


def _fields(entry: Entry) -> dict[str, Any]:
    return {
        "kind": entry.kind,
        "name": entry.name,
        "path": str(entry.path),
        "bytes": entry.nbytes,
        "last_used": datetime.fromtimestamp(entry.last_used, timezone.utc).isoformat(timespec="seconds"),
        "can_be_made_again": entry.reproducible,
        "in_use": entry.in_use,
    }


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e9:.1f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.1f} MB"


def _age(entry: Entry) -> str:
    seconds = max(0.0, time.time() - entry.last_used)
    number, unit = next(((seconds // size, unit) for size, unit in _AGES if seconds >= size), (seconds, "s"))
    return f"{number:.0f} {unit} ago"


def _notes(entry: Entry) -> str:
    notes = ["in use"] if entry.in_use else []
    notes += [] if entry.reproducible else ["source gone"]
    if entry.kind == "shards" and entry.path.parent.parent.name == "local":
        notes.append(entry.path.parent.name)
    return f"  {', '.join(notes)}" if notes else ""
