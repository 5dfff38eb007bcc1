"""Links measured before, one JSON file on the master: by the names and addresses of both ends, with the time."""

import json
from contextlib import suppress
from itertools import combinations
from pathlib import Path
from time import time

from allreduce.base import GroupSpec
from tpi.links import Link, LinkTable

_FRESH_S = 24 * 3600.0


def _key(spec: GroupSpec, a: int, b: int) -> str:
    return " ".join(f"{spec.peers[rank].name}@{spec.peers[rank].address}" for rank in (a, b))


def _read(path: Path) -> dict[str, list[float]]:
    with suppress(OSError, ValueError):
        fields = json.loads(path.read_text())
        if isinstance(fields, dict):
            return {key: entry for key, entry in fields.items() if _valid(entry)}
    return {}


def _valid(entry: object) -> bool:
    return isinstance(entry, list) and len(entry) == 3 and all(isinstance(x, (int, float)) and x > 0 for x in entry)


def load(path: Path, spec: GroupSpec) -> dict[tuple[int, int], Link]:
    """The links of `spec` that were measured within a day; a file that is missing or damaged holds none."""
    entries = _read(path)
    pairs = ((pair, entries.get(_key(spec, *pair))) for pair in combinations(range(spec.size), 2))
    return {pair: Link(entry[0], entry[1]) for pair, entry in pairs if entry and time() - entry[2] < _FRESH_S}


def save(path: Path, spec: GroupSpec, table: LinkTable, known: dict[tuple[int, int], Link]) -> None:
    """Add the links of `table` that were not `known`. If that fails, the next start measures again."""
    entries = _read(path)
    for pair, link in table.links.items():
        if pair not in known:
            entries[_key(spec, *pair)] = [link.latency_s, link.bytes_per_s, time()]
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(entries, indent=1))
        partial.replace(path)
