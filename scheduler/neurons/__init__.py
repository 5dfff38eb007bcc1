"""Neurons in an accelerator's arena: which ones lie there, which move next, and which side computes each of them."""
