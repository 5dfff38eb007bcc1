"""Shared parts of the benchmarks: commits, the machine, commands, models, engines, and runs of several benchmarks."""
