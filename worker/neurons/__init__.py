"""Feed-forward blocks that compute only predicted neurons, on the CPU alone or together with an accelerator."""
