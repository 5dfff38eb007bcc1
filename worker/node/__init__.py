"""The computation of a node: blocks, segments, the order of a step, and the pages of the KV cache."""
