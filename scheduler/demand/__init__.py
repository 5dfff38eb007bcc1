"""Weights that are fetched when they are wanted: experts and neurons in a cache, and what keeps what in it."""
