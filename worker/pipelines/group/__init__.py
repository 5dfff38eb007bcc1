"""A batch over several nodes: what they agree on, and those without an accelerator."""
