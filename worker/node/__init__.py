"""A node that computes: blocks, segments, the order of a step, pages of keys and values."""
