"""An accelerator that is not there: memory with a hard limit, and a model of the time that everything takes.

It judges schedules, never kernels: docs/emulation.md.
"""
