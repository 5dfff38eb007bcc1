"""Wrappers of operating system services: files, clocks, signals, memory, cores."""
