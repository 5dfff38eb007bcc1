"""Experts that are loaded on demand, since the node's memory or accelerator does not hold them all."""
