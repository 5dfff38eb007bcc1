"""The link model: latency and bandwidth between every pair of nodes.

Collectives and the planner predict times with it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from tpi.text import short_number


@dataclass(frozen=True)
class Link:
    """A connection between two nodes as measured from end to end, software included; equal in both directions."""

    latency_s: float  # one way, of an empty message
    bytes_per_s: float

    def seconds(self, nbytes: float) -> float:
        """Return the time that a message of `nbytes` bytes takes (Hockney's model: latency + size / bandwidth)."""
        return self.latency_s + nbytes / self.bytes_per_s

    def words(self) -> str:
        """Return latency and bandwidth as text, for example `4.1 ms and 310 Mbit/s`."""
        return f"{short_number(self.latency_s * 1e3)} ms and {short_number(self.bytes_per_s * 8 / 1e6)} Mbit/s"


LOOPBACK = Link(latency_s=100e-6, bytes_per_s=1e9)  # between two processes of one machine, through ZeroMQ


@dataclass(frozen=True)
class LinkTable:
    """The links of a group of `size` nodes. Links are assumed to be symmetric."""

    size: int
    links: dict[tuple[int, int], Link]  # by (lower rank, higher rank); complete

    @classmethod
    def uniform(cls, size: int, link: Link) -> "LinkTable":
        """Return a table in which all links are equal."""
        return cls(size, dict.fromkeys(combinations(range(size), 2), link))

    def between(self, a: int, b: int) -> Link:
        """Return the link between two different ranks."""
        return self.links[min(a, b), max(a, b)]

    def of(self, rank: int) -> Iterator[Link]:
        """Return the links between the node of rank `rank` and all others."""
        return (self.between(rank, other) for other in range(self.size) if other != rank)

    def latency_s(self) -> float:
        """Return the longest latency of any pair, in seconds; 0 for a single node."""
        return max((link.latency_s for link in self.links.values()), default=0.0)

    def bytes_per_s(self, rank: int) -> float:
        """Return the total rate in bytes per second at which a node can send or receive.

        The rate is that of the node's best link, because its links share one network adapter.
        """
        return max((link.bytes_per_s for link in self.of(rank)), default=float("inf"))

    def to_dict(self) -> dict[str, Any]:
        """Return the table as plain types for JSON and msgpack."""
        pairs = [[a, b, link.latency_s, link.bytes_per_s] for (a, b), link in sorted(self.links.items())]
        return {"size": self.size, "links": pairs}

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> "LinkTable":
        """Return the table that `to_dict` converted."""
        return cls(fields["size"], {(a, b): Link(latency, rate) for a, b, latency, rate in fields["links"]})
