"""Batches in micro-batches through an accelerator."""
