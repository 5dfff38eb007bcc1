"""An order of a step's tasks that keeps the phases of a block apart."""

from collections.abc import Iterator

import pytest

from worker.node.order import Order, Phase, Task


def phase_by_phase(blocks: int, micro_batches: int) -> Iterator[Task]:
    """Yield the tasks block by block, and within a block phase by phase, each for all micro-batches."""
    for block in range(blocks):
        for phase in Phase:
            for micro_batch in range(micro_batches):
                yield Task(micro_batch, block, phase)


def use_order(monkeypatch: pytest.MonkeyPatch, order: Order) -> None:
    """Make all nodes of this process run their steps in `order` instead of block by block."""
    monkeypatch.setattr("worker.node.division.block_by_block", order)
