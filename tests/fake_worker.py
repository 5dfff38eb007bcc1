"""A real worker process whose member computes nothing: the first hidden value of a step says how it behaves."""

import argparse
import threading
from collections.abc import Sequence
from pathlib import Path

from allreduce.base import Endpoints
from tpi.errors import NodeLost
from tpi.messages import Assign, Step
from tpi.progress import Progress
from tpi.sockets import split_address
from tpi.trace import OFF
from worker.commands import serve
from worker.daemon import WorkerOptions
from worker.image import HeldBlock
from worker.member import Figures

FAIL, HANG, BLAME, EXCHANGE = 101.0, 102.0, 103.0, 104.0


class FakeMember:
    def __init__(self, assign: Assign, held: Sequence[HeldBlock], endpoints: Endpoints, progress: Progress) -> None:
        self.kv_blocks = assign.options.kv_blocks + assign.rank
        self.prefill_tokens = assign.options.prefill_tokens
        self.tokens = 0
        self.trace = OFF
        self.progress = 0
        self.steps = 0
        self.assign = assign
        self.endpoints = endpoints
        self.bytes = sum(block.extent.nbytes for block in held)

    def run(self, step: Step) -> None:
        value = float(step.x[0, 0])
        if value == FAIL:
            raise ValueError("told to fail")
        if value == BLAME:
            raise NodeLost("another", "another node is lost")
        if value == HANG:
            threading.Event().wait()
        while value == EXCHANGE and self.endpoints.watch is not None:
            self.endpoints.watch(0)
            threading.Event().wait(0.01)
        self.steps += 1
        self.tokens += len(step.x)
        self.progress += 1

    def figures(self) -> Figures:
        return Figures(steps=self.steps, tokens=self.tokens, weight_bytes=self.bytes, resident_bytes=self.bytes)

    def close(self) -> None:
        self.steps = 0


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--listen", default="127.0.0.1:0")
    parser.add_argument("--name", default="fake")
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--attached", action="store_true")
    flags = parser.parse_args()
    host, port = split_address(flags.listen, lowest_port=0)
    serve(WorkerOptions(host, port, flags.name, flags.cache, attached=flags.attached), FakeMember)


if __name__ == "__main__":
    main()
