"""A real worker process with bad memory: one of its vectors is NaN once it is loaded."""

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from allreduce.base import Endpoints
from tpi.net.messages import Assign
from tpi.progress import Progress
from worker.commands import serve
from worker.node.build import build_node
from worker.node.node import Node
from worker.plan.checks import check_assign
from worker.service.options import WorkerOptions
from worker.shards.image import HeldBlock

DAMAGED = 1  # the first layer's feed-forward half


def build(assign: Assign, held: Sequence[HeldBlock], endpoints: Endpoints, progress: Progress) -> Node:
    held[DAMAGED].vectors["norm"] = np.full_like(held[DAMAGED].vectors["norm"], np.nan)
    return build_node(assign, held, endpoints, progress)


if __name__ == "__main__":
    serve(WorkerOptions("127.0.0.1", 0, "toaster", Path(sys.argv[1])), build, check_assign)
