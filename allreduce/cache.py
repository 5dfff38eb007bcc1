"""Cache of measured links: one JSON file on the master, by the keys and addresses of both ends.

A machine that has moved to another address is measured again, because it may have moved to another network.

An entry of a link is latency in seconds, bytes per second, time of the measurement in seconds since 1970, and 1 if the
link was measured again after a doubt with the same result, or -1 if it is to be measured again. An entry of a group of
nodes, whose key begins with `software`, is the seconds that a sum between them takes in addition to what the links
explain, 1, and the time.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from time import time

from allreduce.base import GroupSpec
from tpi.system.private import make_private, private
from tpi.topology.links import Link

FRESH_S = 24 * 3600.0
_SOFTWARE = "software"  # the first word of the key of a group
_LEAST_S = 1e-6  # least stored seconds of software, since a stored value must be positive
_DOUBTED = -1.0  # the last number of a link that is to be measured again
_SAME = 2.0  # two measurements of a link count as equal if they differ by at most this factor
Pair = tuple[int, int]


@dataclass(frozen=True)
class CachedLink:
    """A link that was measured `age_s` seconds ago.

    `confirmed` is True if the link was measured again because its entry was doubted, and the result was the same.
    """

    link: Link
    age_s: float
    confirmed: bool = False


def end_of(key: bytes, address: str) -> str:
    """Return the name in the cache of the node with this `key`, and this `address` on the plane of sums.

    A node without a key is known by its address. The master has neither key nor address.
    """
    return f"{key.hex()}@{address}" if key else address or "master"


def ends(spec: GroupSpec) -> list[str]:
    """Return the names in the cache of the nodes of `spec`, in rank order."""
    return [end_of(peer.key, peer.address) for peer in spec.peers]


def _key(*ends: str) -> str:
    return " ".join(sorted(ends))


def _read(path: Path) -> dict[str, list[float]]:
    with suppress(OSError, ValueError):
        fields = json.loads(path.read_text())
        if isinstance(fields, dict):
            return {key: entry for key, entry in fields.items() if _valid(entry)}
    return {}


def _valid(entry: object) -> bool:
    if not isinstance(entry, list) or len(entry) not in (3, 4):
        return False
    return all(isinstance(x, (int, float)) for x in entry) and all(x > 0 for x in entry[:3])


def load(path: Path, ends: Sequence[str]) -> dict[Pair, CachedLink]:
    """Return the links between `ends` that were measured within a day, by indices into `ends`.

    Links that are to be measured again are left out. Return no links if the file is missing or damaged.
    """
    entries, now = _read(path), time()
    pairs = (((a, b), entries.get(_key(ends[a], ends[b]))) for a, b in combinations(range(len(ends)), 2))
    fresh = {pair: entry for pair, entry in pairs if entry and not _is_doubted(entry)}
    known = {pair: CachedLink(Link(e[0], e[1]), now - e[2], bool(e[3:] and e[3])) for pair, e in fresh.items()}
    return {pair: one for pair, one in known.items() if 0 <= one.age_s < FRESH_S}


def save(
    path: Path, ends: Sequence[str], links: Mapping[Pair, Link], known: Mapping[Pair, CachedLink], doubted: bool = False
) -> None:
    """Store measured links in the cache. Errors are ignored, because the next start then measures again.

    Args:
        path: the file of the cache.
        ends: the names of the nodes in the cache.
        links: all links between these nodes, by indices into `ends`.
        known: the links that were in the cache before. They are not stored again, unless `doubted` is True.
        doubted: True if the known links were measured again. Those with the same result are marked as confirmed, and
            so are links that were marked by `doubt`.
    """
    entries = _read(path)
    for (a, b), link in links.items():
        key, before = _key(ends[a], ends[b]), known[a, b].link if (a, b) in known else None
        if before is None or doubted:
            if before is None and key in entries and _is_doubted(entries[key]):
                before = Link(*entries[key][:2])
            confirmed = before is not None and _same(before, link)
            entries[key] = [link.latency_s, link.bytes_per_s, time(), int(confirmed)]
    _write(path, entries)


def doubt(path: Path, ends: Sequence[str]) -> set[frozenset[str]]:
    """Mark the links between `ends` so that they are measured again; return their pairs of ends.

    Links that a second measurement has confirmed are not marked. If any link is marked, the seconds of software of all
    groups among `ends` are forgotten, too. Errors are ignored as in `save`.
    """
    entries = _read(path)
    pairs = {_key(*pair): frozenset(pair) for pair in combinations(ends, 2)}
    marked = {key: pair for key, pair in pairs.items() if key in entries and not any(entries[key][3:])}
    if not marked:
        return set()
    entries |= {key: [*entries[key][:3], _DOUBTED] for key in marked}
    _write(path, {key: entry for key, entry in entries.items() if not set(ends).issuperset(_group(key) or (key,))})
    return set(marked.values())


def _is_doubted(entry: Sequence[float]) -> bool:
    return entry[3:] == [_DOUBTED]


def _group(key: str) -> list[str]:
    """Return the ends of the group of nodes that `key` names; empty if `key` names a link."""
    first, *group = key.split(" ")
    return group if first == _SOFTWARE else []


def _write(path: Path, entries: Mapping[str, list[float]]) -> None:
    with suppress(OSError):
        make_private(path.parent)
        partial = path.with_suffix(".partial")
        with open(partial, "w", opener=private) as file:
            json.dump(entries, file, indent=1)
        partial.replace(path)


def save_software(path: Path, ends: Sequence[str], seconds: float) -> None:
    """Store how many seconds a sum of one token between all of `ends` takes beyond what the links explain.

    These are spent in software on the nodes. Errors are ignored as in `save`.
    """
    _write(path, {**_read(path), f"{_SOFTWARE} {_key(*ends)}": [max(seconds, _LEAST_S), 1.0, time()]})


def software(path: Path, ends: Sequence[str]) -> dict[int, float]:
    """Return the seconds that sums were measured to take beyond what the links explain, by the number of nodes.

    Only groups whose nodes are all in `ends`, and measurements of the last day, count. If several groups have the same
    number of nodes, the latest measurement counts.
    """
    latest = dict[int, tuple[float, float]]()
    for key, (seconds, _, at, *_) in _read(path).items():
        group = _group(key)
        if group and set(ends).issuperset(group) and 0 <= time() - at < FRESH_S:
            latest[len(group)] = max(latest.get(len(group), (0.0, 0.0)), (at, seconds))
    return {nodes: seconds for nodes, (_, seconds) in latest.items()}


def _same(one: Link, other: Link) -> bool:
    pairs = ((one.latency_s, other.latency_s), (one.bytes_per_s, other.bytes_per_s))
    return all(a <= _SAME * b and b <= _SAME * a for a, b in pairs)
