"""A small ReGLU language model, trained from scratch on text that every machine with Python has: real activations.

`python -m benchmarks.training` trains it (or goes on where it stopped) and keeps its 8-bit checkpoint with the tests'
data. Random weights would not do: their sparsity, their hot neurons and what predicts them mean nothing.
"""
