"""Foundations shared by every node: configuration, errors, messages, model families, partition, packs, kernels."""

__version__ = "0.1.0"
