"""Experts that are copied to an accelerator on demand: the cost of a copy, and the forecast of such a node."""
