"""Correctness of the tokens, and the cost of formats in quality."""
