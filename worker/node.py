"""One member of the tensor-parallel group: a shard with the KV tables that the master announces. Rank 0 included."""

from collections.abc import Callable
from itertools import cycle

import numpy as np
import numpy.typing as npt

from allreduce.base import Work, idle
from scheduler.budget import Budget
from scheduler.steady import verdict
from scheduler.window import MemoryWindow, Resident
from tpi.kernels.spec import BLOCK_TOKENS
from tpi.messages import Steady, Step
from tpi.trace import Off
from worker.member import Figures
from worker.shard import Shard
from worker.tables import BlockTables

F32 = npt.NDArray[np.float32]


class Node:
    """Runs steps as the master sends them. `worker.member.Member` is what the daemon knows of it."""

    def __init__(self, shard: Shard, budget: Budget, weight_bytes: int, enough: Callable[[int], int]) -> None:
        """`enough(size)` is the `--memory` with which `size` bytes are left for blocks."""
        self.shard = shard
        self.budget = budget
        self.weight_bytes = weight_bytes
        self._enough = enough
        self._tables = BlockTables(shard.kv.blocks, BLOCK_TOKENS)

    @property
    def kv_blocks(self) -> int:
        """Size of the KV pool."""
        return self.shard.kv.blocks

    @property
    def prefill_tokens(self) -> int:
        """The longest step that this node's memory allows."""
        return self.budget.chunk

    @property
    def progress(self) -> int:
        """Grows with every block computed and every byte loaded: who waits for a slow disk is not dead."""
        return self.shard.progress + self.shard.window.progress

    @property
    def trace(self) -> Off:
        """The node's spans."""
        return self.shard.trace

    def run(self, step: Step) -> F32 | None:
        """Compute one step. Returns the last hidden states `[tokens, hidden]` on rank 0, None elsewhere.

        A step without entries computes nothing: with it the group settles how it will sum.
        """
        self._tables.release(step.released)
        if not step.entries:
            self.shard.group.settle(self._rehearsal())
            return None
        return self.shard.forward(step.x, self._tables.batch(step.entries), step.step)

    def _rehearsal(self) -> Work:
        """What this node computes for a block of a prompt's step, with nothing in it; idle if blocks are streamed.

        They would be read for it, and out of their order.
        """
        shard = self.shard
        if not isinstance(shard.window, Resident):
            return idle
        one, payload = shard.group.spec.payload_values
        tokens = min(payload // one, self.prefill_tokens, self.kv_blocks * BLOCK_TOKENS)
        blocks = cycle(range(len(shard.blocks)))
        return lambda parts: shard.rehearse(next(blocks), max(1, tokens // parts))

    def figures(self) -> Figures:
        """Totals of the clock, the group and the window."""
        clock, group, streamed = self.shard.clock, self.shard.group.stats, self.shard.streamed
        return Figures(
            steps=clock.steps,
            tokens=clock.tokens,
            weight_bytes=self.weight_bytes,
            compute_s=max(0.0, clock.compute),
            sync_s=clock.sync,
            stall_s=clock.stall,
            streamed_bytes=streamed.read_bytes,
            disk_s=streamed.read_seconds,
            sent_bytes=group.sent_bytes,
            received_bytes=group.received_bytes,
            resident_bytes=self.budget.placement.memory_bytes,
            planned_bytes=self.budget.used,
            dropped=group.dropped,
        )

    def steady(self) -> Steady | None:
        """The verdict on this node's placement from what was measured; None if nothing is streamed. See `Member`."""
        window = self.shard.window
        if not isinstance(window, MemoryWindow) or not window.placement.streamed_bytes or not self.shard.clock.steps:
            return None
        found = verdict(window.placement, window.costs(), window.history(), self.shard.tiles, self.budget.placement)
        times = found.times
        return Steady(
            times.attention, times.ffn, times.allreduce, times.load_attention, times.load_ffn,
            found.loose, found.tight, found.steady, found.stall_seconds,
            found.window or 0, found.retain or 0, found.window_bytes or 0,
            self._enough(found.least_bytes) if found.least_bytes else 0,
        )  # fmt: skip

    def close(self) -> None:
        """Stop the loader's threads and close the collective's sockets."""
        self.shard.window.close()
        self.shard.group.close()
