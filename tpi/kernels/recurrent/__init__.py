"""Blocks with a state for each sequence in the reference kernels: gated DeltaNet, short convolutions, Mamba2."""
