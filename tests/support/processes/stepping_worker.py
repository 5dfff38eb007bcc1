"""A real worker whose wall clock is wrong by the number of seconds in the file `step` of its cache."""

import sys
import time
from pathlib import Path

from worker.commands import worker

STEP = Path(sys.argv[sys.argv.index("--cache") + 1]) / "step"
today = time.time


def stepped() -> float:
    try:
        return today() + float(STEP.read_text())
    except (OSError, ValueError):  # it is being written
        return today()


if __name__ == "__main__":
    time.time = stepped
    worker(prog_name="tpi worker")
