"""Kernels, one node, two nodes, how soon and how lightly it starts, and what idling costs."""
