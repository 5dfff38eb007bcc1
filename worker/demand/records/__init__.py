"""Neurons that a node reads from disk on demand: the plan, the blocks, and the comparison with a plain window."""
