"""Nodes, groups and what they say to each other."""
