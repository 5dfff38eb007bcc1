"""Triton kernels that run on the card, a file for each kind; `tpi.devices.cuda` launches them.

A program is one instance of a kernel. Parameters in capitals are compile-time constants.
"""
