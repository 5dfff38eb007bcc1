"""A node's trace as a message, and back."""

from typing import get_args

import numpy as np

from tpi.messages import Spans
from tpi.trace import Kind, Off, Row, clock

KINDS: tuple[Kind, ...] = get_args(Kind)


def pack_spans(session: int, epoch: int, trace: Off, rows: bool) -> Spans:
    """The node's clock now and, with `rows`, every span of its trace."""
    recorded = list(trace.rows) if rows else []
    names = list(dict.fromkeys(name for _, name, _, _ in recorded))
    index = {name: number for number, name in enumerate(names)}
    table = [(KINDS.index(kind), index[name], begin, end) for kind, name, begin, end in recorded]
    return Spans(session, epoch, clock(), tuple(names), np.asarray(table, np.int64).reshape(-1, 4))


def unpack_spans(spans: Spans) -> list[Row]:
    """The spans of a message; those of unknown kinds or names are left out."""
    return [
        (KINDS[kind], spans.names[name], begin, end)
        for kind, name, begin, end in spans.rows.tolist()
        if 0 <= kind < len(KINDS) and 0 <= name < len(spans.names)
    ]
