"""Neurons that move: which lie in an accelerator's arena, what goes there next, who computes what, what it costs."""
