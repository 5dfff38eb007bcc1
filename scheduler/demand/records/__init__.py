"""Neurons that are read from disk when they are needed: records in slots, and the reads that fill them."""
