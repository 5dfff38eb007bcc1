"""Nodes and groups for tests, and their messages."""
