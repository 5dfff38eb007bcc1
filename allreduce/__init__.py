"""Collectives: how the nodes of a tensor-parallel group sum their partial results."""
