"""Random test cases for kernels, and grids of parameters."""
