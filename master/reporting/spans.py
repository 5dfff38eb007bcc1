"""Arithmetic on the nodes' totals: the work within some periods of a run, without the time between them."""

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

from tpi.net.questions import Stats

Span = tuple[Sequence[Stats], Sequence[Stats]]
"""Totals of every node, rank 0 first, at the beginning and at the end of a period."""

_STATE = (  # fields of Stats that describe a state and are not sums over time
    "session", "epoch", "weight_bytes", "resident_bytes", "planned_bytes", "peak_rss_bytes", "steady", "accelerator",
)  # fmt: skip
_SUMS = tuple(field.name for field in fields(Stats) if field.name not in _STATE)


def nothing(stats: Stats) -> Stats:
    """Return `stats` with all sums set to 0, as of a node that has computed nothing."""
    nothing_done: dict[str, Any] = dict.fromkeys(_SUMS, 0)
    return replace(stats, steady=None, **nothing_done)


def before(after: Sequence[Stats], spans: Sequence[Span]) -> list[Stats]:
    """Return the totals to subtract from `after` so that only the work of `spans` is left."""
    return [
        replace(stats, **{name: getattr(stats, name) - _total(spans, rank, name) for name in _SUMS})
        for rank, stats in enumerate(after)
    ]


def _total(spans: Sequence[Span], rank: int, name: str) -> float:
    totals = (getattr(end[rank], name) - getattr(begin[rank], name) for begin, end in spans)
    return float(sum(totals)) if name.endswith("_s") else int(sum(totals))
