"""Which tokens of a step are together in a micro-batch: from its sequences and a few sizes alone, on any node alike."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tpi.kernels.spec import Batch
from worker.pipelines.visiting import page_numbers

I64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Sizes:
    """What micro-batches may be; nodes of a group have the same.

    Attributes:
        micro_batch: sequences of one at most.
        least: how many there are where sequences suffice, so that what can overlap does.
        chunk: tokens of a prompt's at most.
        pages: different pages that one may need; 0: any number.
        visits: whether answers need room for their pages, too.
    """

    micro_batch: int
    least: int
    chunk: int
    pages: int = 0
    visits: bool = False


def decodes(batch: Batch) -> bool:
    """Whether no sequence has more than one token in the step; else it is a prompt's."""
    return len(np.unique(batch.sequence)) == len(batch.positions)


def divided(sizes: Sizes, batch: Batch) -> list[I64]:
    """The tokens of every micro-batch of a step, by their rows."""
    return _answers(sizes, batch) if decodes(batch) else list(_prompts(sizes, batch))


def _answers(sizes: Sizes, batch: Batch) -> list[I64]:
    """Tokens of one sequence each: micro-batches of even numbers of sequences, and of about as much to attend to.

    Algorithm 2: the longest first, each to whichever has the least so far and is not full.
    """
    tokens = len(batch.positions)
    count = max(-(-tokens // sizes.micro_batch), min(tokens, sizes.least), _least_parts(sizes, batch))
    found: list[list[int]] = [[] for _ in range(count)]
    filled, most = [0] * count, -(-tokens // count)
    for row in np.argsort(-batch.positions, kind="stable").tolist():
        at = min((at for at in range(count) if len(found[at]) < most), key=lambda at: filled[at])
        found[at].append(row)
        filled[at] += int(batch.positions[row]) + 1
    return [np.sort(np.array(rows, np.int64)) for rows in found if rows]


def _least_parts(sizes: Sizes, batch: Batch) -> int:
    """Micro-batches that are needed for each one's pages to have room."""
    if not (sizes.pages and sizes.visits):
        return 1
    each = max(1, sizes.pages // max(1, len(batch.tables[0])))
    return -(-len(batch.positions) // each)


def _prompts(sizes: Sizes, batch: Batch) -> Iterator[I64]:
    """Tokens in order, as many together as a chunk has and as there are pages for."""
    begin, tokens = 0, len(batch.positions)
    while begin < tokens:
        end = min(begin + sizes.chunk, tokens)
        while end - begin > 1 and not _has_room(sizes, batch.cut(slice(begin, end))):
            end = begin + (end - begin) // 2
        yield np.arange(begin, end)
        begin = end


def _has_room(sizes: Sizes, batch: Batch) -> bool:
    return not sizes.pages or len(page_numbers(batch).home) <= sizes.pages
