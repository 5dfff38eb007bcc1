"""Mutated inputs, as strangers could send: every reader must accept one or raise one of the project's errors."""
