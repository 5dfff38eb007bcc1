"""What every node knows: configuration, errors, messages, model families, partition, weight packs, kernels."""

__version__ = "0.1.0"
