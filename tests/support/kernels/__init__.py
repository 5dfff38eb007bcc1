"""Cases for kernels."""
