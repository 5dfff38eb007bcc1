"""A node's accelerator at work: what stays there, what passes through it, what visits it."""
