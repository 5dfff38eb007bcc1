"""Totals of the nodes taken apart: what they did in some stretches of a run, and not in between."""

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

from tpi.net.questions import Stats

Span = tuple[Sequence[Stats], Sequence[Stats]]
"""Totals of every node, rank 0 first, at the beginning and at the end of a stretch."""

_STATE = (  # of Stats: not sums
    "session", "epoch", "weight_bytes", "resident_bytes", "planned_bytes", "peak_rss_bytes", "steady", "accelerator",
)  # fmt: skip
_SUMS = tuple(field.name for field in fields(Stats) if field.name not in _STATE)


def nothing(stats: Stats) -> Stats:
    """The totals of a node that has done nothing yet."""
    nothing_done: dict[str, Any] = dict.fromkeys(_SUMS, 0)
    return replace(stats, steady=None, **nothing_done)


def before(after: Sequence[Stats], spans: Sequence[Span]) -> list[Stats]:
    """`after` less all that was done in `spans`: the totals from which only that is counted."""
    return [
        replace(stats, **{name: getattr(stats, name) - _total(spans, rank, name) for name in _SUMS})
        for rank, stats in enumerate(after)
    ]


def _total(spans: Sequence[Span], rank: int, name: str) -> float:
    totals = (getattr(end[rank], name) - getattr(begin[rank], name) for begin, end in spans)
    return float(sum(totals)) if name.endswith("_s") else int(sum(totals))
