"""Shards, a node's units as files: how they are fetched, checked, stored and removed."""
