"""Small language models, trained from scratch on text that every machine with Python has: one with ReGLU, whose
activations are real, and a mixture of experts, whose routing is.

`python -m benchmarks.training` trains one (or goes on where it stopped) and keeps its 8-bit checkpoint with the tests'
data. Random weights would not do, because their sparsity, hot neurons, hot experts and predictions have no meaning.
"""
