"""Algorithms of the collectives: which node sends which data to which other nodes."""
