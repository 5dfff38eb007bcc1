"""Batches in micro-batches through an accelerator: MoE-Lightning's pipeline, and the one for keys and values there."""
