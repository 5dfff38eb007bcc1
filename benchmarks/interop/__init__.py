"""Clients of other makers against `tpi serve`, each in an environment of its own with its newest version."""
