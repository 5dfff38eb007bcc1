"""Shards: a node's units as files, fetched, checked, kept and removed."""
