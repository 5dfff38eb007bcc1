"""Collectives: how the nodes of one tensor-parallel group sum their partial results."""
