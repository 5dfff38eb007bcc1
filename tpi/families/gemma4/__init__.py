"""Gemma 4: heads of another number and size in layers without a sliding window."""
