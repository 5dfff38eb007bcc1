"""Neurons that come from disk when they are wanted: records in slots, and the reads that fill them."""
