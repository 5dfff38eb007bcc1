"""Families with gated short convolutions: LFM2."""
