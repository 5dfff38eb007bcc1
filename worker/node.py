"""One member of the tensor-parallel group: a shard with the KV tables that the master announces. Rank 0 included."""

import numpy as np
import numpy.typing as npt

from tpi.kernels.spec import BLOCK_TOKENS
from tpi.messages import Step
from worker.shard import Shard
from worker.tables import BlockTables

F32 = npt.NDArray[np.float32]


class Node:
    """Runs steps as the master sends them."""

    def __init__(self, shard: Shard) -> None:
        self.shard = shard
        self._tables = BlockTables(shard.kv.blocks, BLOCK_TOKENS)

    def run(self, step: Step) -> F32 | None:
        """Compute one step. Returns the last hidden states `[tokens, hidden]` on rank 0, None elsewhere."""
        self._tables.release(step.released)
        return self.shard.forward(step.x, self._tables.batch(step.entries), step.step)

    def close(self) -> None:
        """Stop the loader's threads and close the collective's sockets."""
        self.shard.window.close()
        self.shard.group.close()
