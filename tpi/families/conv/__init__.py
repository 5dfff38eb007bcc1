"""Families with gated short convolutions: LFM2 and LFM3."""
