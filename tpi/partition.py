"""Partition of a model over nodes: which units of a block each node holds. All split arithmetic is here.

A *unit* is the smallest piece of a block that is stored, sent and computed as one: a group of query heads, a group of
KV heads, or `FFN_UNIT` FFN neurons. Nodes get contiguous ranges of units in rank order.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from tpi.errors import PlanError

FFN_UNIT = 32  # neurons in a unit; a quantisation group of the down projection


@dataclass(frozen=True)
class Range:
    """Half-open range `[first, last)` of units, heads or neurons. May be empty."""

    first: int
    last: int

    def __len__(self) -> int:
        return self.last - self.first

    def scaled(self, width: int, limit: int) -> "Range":
        """Return the range in items, where each unit is `width` items wide and the last unit may be cut at `limit`."""
        return Range(min(self.first * width, limit), min(self.last * width, limit))

    def as_list(self) -> list[int]:
        """Return `[first, last]`, the form used in messages and in `--json`."""
        return [self.first, self.last]


@dataclass(frozen=True)
class Shard:
    """Units of every layer that one node holds."""

    query: Range
    kv: Range
    ffn: Range  # of dense feed-forward blocks
    shared: Range = Range(0, 0)  # of shared experts
    experts: Range = Range(0, 0)  # numbers of the routed experts
    expert: Range = Range(0, 0)  # units of each of these experts
    value: Range = Range(0, 0)  # value heads, or channels, of recurrent layers
    key: Range = Range(0, 0)  # key heads of recurrent layers
    full_kv: Range = Range(0, 0)  # KV units of layers with heads of their own (`ModelConfig.full_heads`)

    def at_layer(self, full_heads: bool, wide: bool = False) -> "Shard":
        """Return the shard with the KV units of a layer in `kv`, and its neurons in `ffn`.

        `full_heads` is `ModelConfig.has_full_heads`, and `wide` is `ModelConfig.has_wide_ffn`.
        """
        found = replace(self, kv=self.full_kv) if full_heads else self
        return replace(found, ffn=Range(2 * self.ffn.first, 2 * self.ffn.last)) if wide else found


def deal(units: int, shares: Sequence[float]) -> list[Range]:
    """Divide `units` among nodes in proportion to `shares`, as contiguous ranges in rank order.

    Uses largest-remainder rounding. A node with a share of zero gets nothing; every other node gets at least one unit.

    Raises:
        PlanError: if no share is positive, one is negative, or there are more positive shares than units.
    """
    if any(share < 0 for share in shares) or not any(share > 0 for share in shares):
        raise PlanError(f"the shares {list(shares)} are not valid; give non-negative numbers, at least one above 0")
    from fractions import Fraction  # imported here because only the master divides units

    exact_shares = [Fraction(share) for share in shares]
    holders = [rank for rank, share in enumerate(exact_shares) if share > 0]
    if len(holders) > units:
        raise PlanError(f"{len(holders)} nodes cannot share {units} units; use at most {units} nodes")
    total = sum(exact_shares)
    exact = [units * share / total for share in exact_shares]
    counts = [max(int(part), 1) if share else 0 for part, share in zip(exact, exact_shares, strict=True)]
    while sum(counts) != units:
        step = 1 if sum(counts) < units else -1
        # change the count that is furthest from its exact part, but none to below one unit
        movable = [rank for rank in holders if step > 0 or counts[rank] > 1]
        chosen = max(movable, key=lambda rank: (step * (exact[rank] - counts[rank]), -rank))
        counts[chosen] += step
    ends = list(accumulate(counts))
    return [Range(end - count, end) for end, count in zip(ends, counts, strict=True)]


def deal_experts(experts: int, units: int, shares: Sequence[float]) -> list[tuple[Range, Range]]:
    """Return for each node which routed experts it holds, and which units of each. An expert has `units` units.

    Each node holds a slice of every expert, so that any choice of experts loads all nodes alike. If there are more
    nodes than units of an expert, each holds whole experts.

    Raises:
        PlanError: if no share is positive, one is negative, or there are more positive shares than experts and units.
    """
    if sum(share > 0 for share in shares) <= units:
        return [(Range(0, experts), part) for part in deal(units, shares)]
    return [(part, Range(0, units)) for part in deal(experts, shares)]


def expert_ranges(experts: Range, units: Range, each: int) -> list[Range]:
    """Return the ranges of a run that hold the units `units` of each expert in `experts`.

    The run has expert after expert, `each` units long. Adjacent ranges are returned as one.
    """
    if not len(experts) or not len(units):
        return [Range(0, 0)]
    if len(units) == each:
        return [Range(experts.first * each, experts.last * each)]
    begins = range(experts.first * each, experts.last * each, each)
    return [Range(begin + units.first, begin + units.last) for begin in begins]


def by_expert(units: Range, each: int) -> list[tuple[int, Range]]:
    """Return the experts whose units are in the range `units` of a run, each with its part of the range.

    The run has the experts one after the other, `each` units long.
    """
    first, last = units.first // each, -(-units.last // each)
    parts = [(at, Range(max(units.first, at * each), min(units.last, (at + 1) * each))) for at in range(first, last)]
    return [(expert, part) for expert, part in parts if len(part)]


def kv_range(query: Range, query_unit_heads: int, kv_unit_heads: int, heads: int, kv_heads: int) -> Range:
    """Return the KV units that the query units in `query` attend to.

    A query unit has `query_unit_heads` heads, a KV unit `kv_unit_heads`; the model has `heads` and `kv_heads`.
    A KV unit whose query group is cut between two nodes belongs to both.
    """
    if not len(query):
        return Range(0, 0)
    group = heads // kv_heads
    span = query.scaled(query_unit_heads, heads)
    first_head, last_head = span.first // group, (span.last - 1) // group
    return Range(first_head // kv_unit_heads, last_head // kv_unit_heads + 1)
