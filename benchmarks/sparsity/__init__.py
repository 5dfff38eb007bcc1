"""Sparse activations: the gain from computing only active neurons, on the CPU and with an accelerator."""
