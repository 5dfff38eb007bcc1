"""One member of the tensor-parallel group: a shard with the KV tables that the master announces. Rank 0 included."""

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from tpi.kv import BLOCK_TOKENS
from worker.shard import Shard
from worker.tables import BlockTables, Entry

F32 = npt.NDArray[np.float32]


class Node:
    """Runs steps as the master sends them."""

    def __init__(self, shard: Shard) -> None:
        self.shard = shard
        self._tables = BlockTables(shard.kv.blocks, BLOCK_TOKENS)

    def run(self, step: int, entries: Sequence[Entry], x: F32) -> F32 | None:
        """Compute one step over `entries`; `x` is `[tokens, hidden]`. The last hidden states on rank 0, else None."""
        return self.shard.forward(x, self._tables.batch(entries), step)

    def release(self, sequences: Iterable[int]) -> None:
        """Forget finished sequences."""
        self._tables.release(sequences)

    def close(self) -> None:
        """Stop the loader's threads and close the collective's sockets."""
        self.shard.window.close()
        self.shard.group.close()
