"""Blocks that are computed gate first: which neurons count, and whether that pays."""
