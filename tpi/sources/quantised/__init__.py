"""Readers of quantised safetensors: codes, scales and zero points of a matrix in tensors of their own become one."""
