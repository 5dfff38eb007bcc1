"""The division of a step's tokens into micro-batches.

It depends only on the step's sequences and on `MicroBatchLimits`, so that all nodes of a group divide a step in the
same way.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tpi.kernels.spec import Batch
from worker.pipelines.visiting import page_numbers

I64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class MicroBatchLimits:
    """Limits on the sizes of micro-batches, the same on all nodes of a group.

    Attributes:
        micro_batch: the largest number of sequences in a micro-batch of a decode step.
        min_parts: the least number of micro-batches of a decode step, so that transfers and computations overlap. A
            step with fewer sequences than that has one micro-batch per sequence.
        chunk: the largest number of tokens in a micro-batch of a prompt step.
        pages: the largest number of different KV pages that a micro-batch may need; 0 means any number.
        limit_decode: True if `pages` limits decode steps too.
    """

    micro_batch: int
    min_parts: int
    chunk: int
    pages: int = 0
    limit_decode: bool = False


def is_decode(batch: Batch) -> bool:
    """Return True for a decode step, in which no sequence has more than one token; False for a prompt step."""
    return len(np.unique(batch.sequence)) == len(batch.positions)


def divided(sizes: MicroBatchLimits, batch: Batch) -> list[I64]:
    """Return the indices in the step of each micro-batch's tokens, in ascending order."""
    return _answers(sizes, batch) if is_decode(batch) else list(_prompts(sizes, batch))


def _answers(sizes: MicroBatchLimits, batch: Batch) -> list[I64]:
    """Divide a decode step into micro-batches with nearly equal numbers of sequences and of context tokens in all.

    MoE-Lightning's algorithm 2: take the sequences from the longest to the shortest. Add each to the micro-batch that
    has the fewest context tokens so far, among the micro-batches that are not full.
    """
    tokens = len(batch.positions)
    count = max(-(-tokens // sizes.micro_batch), min(tokens, sizes.min_parts), _least_parts(sizes, batch))
    found: list[list[int]] = [[] for _ in range(count)]
    filled, most = [0] * count, -(-tokens // count)
    for row in np.argsort(-batch.positions, kind="stable").tolist():
        at = min((at for at in range(count) if len(found[at]) < most), key=lambda at: filled[at])
        found[at].append(row)
        filled[at] += int(batch.positions[row]) + 1
    return [np.sort(np.array(rows, np.int64)) for rows in found if rows]


def _least_parts(sizes: MicroBatchLimits, batch: Batch) -> int:
    """Return the least number of micro-batches of a decode step such that no micro-batch needs too many KV pages.

    The limit is `sizes.pages`. Every sequence is counted with as many pages as the longest one has.
    """
    if not (sizes.pages and sizes.limit_decode):
        return 1
    each = max(1, sizes.pages // max(1, len(batch.tables[0])))
    return -(-len(batch.positions) // each)


def _prompts(sizes: MicroBatchLimits, batch: Batch) -> Iterator[I64]:
    """Yield the indices in the step of each micro-batch's tokens, for a prompt step.

    A micro-batch has consecutive tokens, at most `sizes.chunk` of them. While a micro-batch needs more KV pages than
    `sizes.pages`, its number of tokens is halved.
    """
    begin, tokens = 0, len(batch.positions)
    while begin < tokens:
        end = min(begin + sizes.chunk, tokens)
        while end - begin > 1 and not _has_room(sizes, batch.cut(slice(begin, end))):
            end = begin + (end - begin) // 2
        yield np.arange(begin, end)
        begin = end


def _has_room(sizes: MicroBatchLimits, batch: Batch) -> bool:
    return not sizes.pages or len(page_numbers(batch).host_pages) <= sizes.pages
