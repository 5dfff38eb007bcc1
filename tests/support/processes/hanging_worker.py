"""A real worker whose computation hangs for good once a file called `hang` is in its cache."""

import sys
from pathlib import Path
from threading import Event

from worker.commands import worker
from worker.node.node import Node

CACHE = Path(sys.argv[sys.argv.index("--cache") + 1])
run = Node.run


def run_or_hang(self: Node, step: object) -> object:
    if (CACHE / "hang").exists():
        Event().wait()
    return run(self, step)  # type: ignore[arg-type]


if __name__ == "__main__":
    Node.run = run_or_hang  # type: ignore[method-assign,assignment]
    worker(prog_name="tpi worker")
