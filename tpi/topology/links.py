"""The link model: latency and bandwidth between every pair of nodes; collectives and the planner predict with it."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import Any


@dataclass(frozen=True)
class Link:
    """One way between two nodes, end to end, software included."""

    latency_s: float  # of a message of no size
    bytes_per_s: float

    def seconds(self, nbytes: float) -> float:
        """Time that a message of `nbytes` takes (Hockney's model: latency + size / bandwidth)."""
        return self.latency_s + nbytes / self.bytes_per_s


LOOPBACK = Link(latency_s=100e-6, bytes_per_s=1e9)  # between two processes of one machine, through ZeroMQ


@dataclass(frozen=True)
class LinkTable:
    """The links of a group of `size` nodes. Links are taken to be symmetric."""

    size: int
    links: dict[tuple[int, int], Link]  # by (lower rank, higher rank); complete

    @classmethod
    def uniform(cls, size: int, link: Link) -> "LinkTable":
        """A table in which all links are alike."""
        return cls(size, dict.fromkeys(combinations(range(size), 2), link))

    def between(self, a: int, b: int) -> Link:
        """The link between two different ranks."""
        return self.links[min(a, b), max(a, b)]

    def of(self, rank: int) -> Iterator[Link]:
        """All links of one node."""
        return (self.between(rank, other) for other in range(self.size) if other != rank)

    def latency_s(self) -> float:
        """The longest latency of any pair."""
        return max((link.latency_s for link in self.links.values()), default=0.0)

    def bytes_per_s(self, rank: int) -> float:
        """What a node can send, or receive, in all: as over its best link, since its links share one adapter."""
        return max((link.bytes_per_s for link in self.of(rank)), default=float("inf"))

    def to_dict(self) -> dict[str, Any]:
        """Plain types for JSON and msgpack."""
        pairs = [[a, b, link.latency_s, link.bytes_per_s] for (a, b), link in sorted(self.links.items())]
        return {"size": self.size, "links": pairs}

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> "LinkTable":
        """Inverse of `to_dict`."""
        return cls(fields["size"], {(a, b): Link(latency, rate) for a, b, latency, rate in fields["links"]})
