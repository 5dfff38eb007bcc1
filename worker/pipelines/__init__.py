"""The pipelines that compute a batch on one accelerator in micro-batches, after MoE-Lightning."""
