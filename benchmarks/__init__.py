"""What TPI promises, measured: `python -m benchmarks`. Not part of the installed program."""
