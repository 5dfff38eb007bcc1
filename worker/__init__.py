"""One node of the tensor-parallel group: its shard cache, its block loop and its daemon."""
