"""Neurons that a step chooses: predicted, computed where they lie, on the CPU and on an accelerator at once."""
