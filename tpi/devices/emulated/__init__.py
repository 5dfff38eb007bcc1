"""An accelerator that does not exist: memory with a hard limit, and a model of the time that every operation takes.

It measures schedules, not kernels: docs/emulation.md.
"""
