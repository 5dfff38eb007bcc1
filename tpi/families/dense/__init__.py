"""Families without experts that differ from Llama in a few settings or names."""
