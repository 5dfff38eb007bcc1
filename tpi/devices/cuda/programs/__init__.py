"""Triton kernels that run on the card, a file for each kind; `tpi.devices.cuda` launches them.

A program is one instance of a kernel. Parameters in capitals are compile-time constants. Those that describe packed
weights are:

- `offset`, `unit`, `tall`, `deep`: the place of the bytes (`tpi.devices.cuda.programs.weights`).
- FORMAT: the weight format. BYTES: bytes of a group; CODES: bytes of its codes.
- TILED: True for the tiled layout, False for the record layout.
"""
