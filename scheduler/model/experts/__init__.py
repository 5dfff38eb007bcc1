"""Experts on an accelerator on demand: what taking one there costs, and what such a node is predicted to take."""
