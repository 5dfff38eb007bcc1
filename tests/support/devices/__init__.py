"""Devices for tests, and nodes that offload to them."""
