"""What computes inside a node: today the CPU."""
