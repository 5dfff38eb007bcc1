"""Neurons of a node that its memory does not hold: planned, opened, computed by slot, and judged."""
