"""Experts of a node that its memory does not hold: planned, opened, and what is said of them."""
