"""Tables of a step for the attention kernels: its tokens' positions, and the query rows that share reads."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from tpi.devices.opencl.card import OpenClCard
from tpi.kernels.spec import I32, STREAM_TOKENS, AttentionSpec, Batch

_CHUNK = 256  # positions per work-group if few tokens attend to many
_ROWS = (2, 8)  # query rows per work-group; the smallest that suffices is used


@dataclass(frozen=True)
class AttentionStep:
    """Buffers of int32 on the card, and their sizes.

    Attributes:
        positions, sequence: `[tokens]`; tables: `[sequences, table_width]`; as in `tpi.kernels.spec.Batch`.
        rows: `[tokens * heads]`, token * heads + head, with the rows of one task together.
        tasks: `[task_count, 4]`: first row, number of rows (at most `rows_each`), KV head, sequence.
        chunk, chunks: positions of a chunk, and the number of chunks of the longest sequence.
    """

    tokens: int
    positions: Any
    sequence: Any
    tables: Any
    table_width: int
    rows: Any
    rows_each: int
    tasks: Any
    task_count: int
    chunk: int
    chunks: int


def step_of(card: OpenClCard, spec: AttentionSpec, batch: Batch) -> AttentionStep:
    """Return the tables of a step for the heads of `spec`."""
    tokens, runs = len(batch.positions), _runs(batch.sequence)
    most = max((end - first for first, end in runs), default=1) * max(np.bincount(spec.kv_index), default=1)
    each = next((rows for rows in _ROWS if rows >= most), _ROWS[-1])
    rows, tasks = _deal(spec, batch, runs, each)
    longest = int(batch.positions.max(initial=0)) + 1
    chunk = _CHUNK if tokens < STREAM_TOKENS else longest
    return AttentionStep(
        tokens=tokens,
        positions=card.upload(batch.positions),
        sequence=card.upload(batch.sequence),
        tables=card.upload(batch.tables),
        table_width=batch.tables.shape[1],
        rows=card.upload(rows),
        rows_each=each,
        tasks=card.upload(tasks),
        task_count=len(tasks),
        chunk=chunk,
        chunks=-(-longest // chunk),
    )


def _runs(sequence: I32) -> list[tuple[int, int]]:
    """Return the runs of consecutive tokens of one sequence, each as its first token and its last token + 1."""
    edges = np.flatnonzero(np.diff(sequence)) + 1
    return [(int(a), int(b)) for a, b in pairwise([0, *edges, len(sequence)]) if b > a]


def _deal(spec: AttentionSpec, batch: Batch, runs: list[tuple[int, int]], each: int) -> tuple[I32, I32]:
    """Return the query rows sorted by task, and the table of tasks (`AttentionStep`).

    Each task has at most `each` rows.
    """
    rows: list[I32] = [np.empty(0, np.int32)]
    tasks: list[tuple[int, int, int, int]] = []
    at = 0
    for kv_head in range(spec.kv_heads):
        members = np.flatnonzero(spec.kv_index == kv_head).astype(np.int32)
        for first, end in runs:
            shared = (np.arange(first, end, dtype=np.int32)[:, None] * np.int32(spec.heads) + members).reshape(-1)
            starts = range(0, len(shared), each)
            sequence = int(batch.sequence[first])
            tasks += [(at + start, min(each, len(shared) - start), kv_head, sequence) for start in starts]
            rows.append(shared)
            at += len(shared)
    return np.concatenate(rows), np.array(tasks, np.int32).reshape(-1, 4)
