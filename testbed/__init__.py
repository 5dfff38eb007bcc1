"""Homes in a box: network namespaces, traffic control, link emulation, cgroups, faults."""
