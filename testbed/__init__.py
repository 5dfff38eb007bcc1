"""Emulated home networks: network namespaces, traffic control, link emulation, cgroups, faults."""
