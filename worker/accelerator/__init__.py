"""The accelerators of a node: resident weights, rings for streamed weights, and the KV cache."""
