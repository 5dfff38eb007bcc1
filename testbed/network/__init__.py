"""Emulation of links, by the kernel or by a user-space process."""
