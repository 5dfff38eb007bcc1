"""Small language models, trained from scratch on text that every machine with Python has: a ReGLU model with realistic
activations, and a mixture of experts with realistic routing.

`python -m benchmarks.training` trains one (or goes on where it stopped) and keeps its 8-bit checkpoint with the tests'
data. Random weights are no substitute: their sparsity, hot neurons, hot experts and predictions have no meaning.
"""
