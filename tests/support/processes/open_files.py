"""A program that opens files, and closes them itself when it ends: `python -m tests.support.processes.open_files`."""

import atexit
import os
import sys

for _ in range(20):
    atexit.register(os.close, os.open(os.devnull, os.O_RDONLY))
sys.stdout.write(str(os.getppid()))
