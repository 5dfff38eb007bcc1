"""Batches on several nodes: the settings that they share, and nodes without an accelerator."""
