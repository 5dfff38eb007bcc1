"""Tests, from the smallest parts to whole houses of processes."""

import os
import sys

# Where the environment forbids to write bytecode, hundreds of processes would each compile every module again.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
