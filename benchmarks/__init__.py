"""Measurements of what TPI promises: `python -m benchmarks`. Not part of the installed program."""
