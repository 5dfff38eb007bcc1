"""Collectives, on one machine and in emulated homes."""
