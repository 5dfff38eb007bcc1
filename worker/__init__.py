"""One node of the tensor-parallel group: shard cache, block loop, daemon."""
