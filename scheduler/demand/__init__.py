"""Weights that are loaded when they are used: a cache of experts and neurons, and its eviction policies."""
