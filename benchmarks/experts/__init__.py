"""Mixtures of experts and batches on the emulated accelerator, against MoE-Lightning (docs/batching.md)."""
