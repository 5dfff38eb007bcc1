"""Sparse activations: what choosing neurons gains, on the CPU and beside an accelerator."""
