"""Allocation of KV blocks: the master decides for every node which block holds which tokens."""

from tpi.errors import PlanError
from tpi.kernels.spec import BLOCK_TOKENS
from tpi.kv import blocks_for


class KvBlocks:
    """A free list over the pool of KV blocks; the pool is the smallest that any node reports."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._free = list(range(total - 1, -1, -1))

    @property
    def free(self) -> int:
        """Blocks that no sequence holds."""
        return len(self._free)

    def grow(self, table: list[int], tokens: int) -> list[int]:
        """Append blocks to `table` until it holds `tokens` tokens; returns the blocks appended.

        Raises:
            PlanError: if the pool has too few free blocks; `table` is unchanged then.
        """
        missing = blocks_for(tokens) - len(table)
        if missing > len(self._free):
            held = (len(table) + len(self._free)) * BLOCK_TOKENS
            raise PlanError(f"{tokens} tokens do not fit in the KV cache, which has room for {held}; raise -c")
        appended = [self._free.pop() for _ in range(max(missing, 0))]
        table.extend(appended)
        return appended

    def release(self, table: list[int]) -> None:
        """Give all blocks of `table` back and empty it."""
        self._free.extend(reversed(table))
        table.clear()
