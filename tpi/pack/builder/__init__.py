"""Conversion of a model's files to a pack."""
