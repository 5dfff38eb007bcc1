"""Families with Mamba2 layers: Granite 4."""
