"""What runs on the card, in Triton's language: each file is a kind of kernel; `tpi.devices.cuda` launches them.

A program is one instance of a kernel. Names in capitals are known when it is compiled.
"""
