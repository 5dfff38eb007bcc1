"""Measurements of what TPI promises: `python -m benchmarks`. They are not part of the installed program."""
