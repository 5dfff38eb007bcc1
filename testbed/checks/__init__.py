"""Checks: what this machine supports, and whether a testbed's links are as specified."""
