"""A real worker process whose node computes nothing: the first hidden value of a step selects its behaviour."""

import argparse
import resource
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import zmq

from allreduce.base import Endpoints
from scheduler.model.timeline import NO_OTHER_WAITS, OtherWaits
from scheduler.window.stats import WindowPosition
from tpi.errors import NodeLost
from tpi.keys.policy import KeyPolicy
from tpi.net.messages import (
    Assign,
    Step,
)
from tpi.net.questions import Steady
from tpi.net.sockets import split_address
from tpi.progress import Progress
from tpi.trace import Trace, clock
from worker.commands import serve
from worker.service import lease
from worker.service.options import WorkerOptions
from worker.service.served import Figures
from worker.shards.image import HeldBlock

FAIL, HANG, BLAME, EXCHANGE, SWELL = 101.0, 102.0, 103.0, 104.0, 105.0
NONSENSE, STUCK, QUIT, EXHAUST = 106.0, 107.0, 108.0, 109.0
SWELL_BYTES = 64 << 20  # of memory that a step takes for a moment
FAKE_SPANS = 3  # that its trace has room for; every step is one


class FakeMember:
    def __init__(self, assign: Assign, held: Sequence[HeldBlock], endpoints: Endpoints, progress: Progress) -> None:
        self.pages = assign.options.pages + assign.rank
        self.prefill_tokens = assign.options.prefill_tokens
        self.tokens = 0
        self.trace = Trace(FAKE_SPANS)
        self.progress = 0
        self.position = WindowPosition()
        self.steps = 0
        self.assign = assign
        self.endpoints = endpoints
        self.nonsense = self.stuck = False
        self.bytes = sum(block.extent.nbytes for block in held)

    def run(self, step: Step) -> None:
        value, now = float(step.x[0, 0]), clock()
        self.trace.add("compute", f"step {step.step}", now, now)
        if value == FAIL:
            raise ValueError("told to fail")
        if value == BLAME:
            raise NodeLost("another", "another node is lost")
        if value == SWELL:
            np.ones(SWELL_BYTES, np.uint8)
        if value == EXHAUST:
            np.ones(1 << 60, np.uint8)
        if value == QUIT:
            raise SystemExit("told to quit")
        self.nonsense |= value == NONSENSE
        self.stuck |= value == STUCK
        if value == HANG:
            threading.Event().wait()
        while value == EXCHANGE and self.endpoints.watch is not None:
            self.endpoints.watch(0)
            threading.Event().wait(0.01)
        self.steps += 1
        self.tokens += len(step.x)
        self.progress += 1

    def figures(self) -> Figures:
        size, planned = self.bytes, self.assign.options.memory
        if self.nonsense:
            return Figures(compute_s=float("nan"))
        return Figures(self.steps, self.tokens, size, resident_bytes=size, planned_bytes=planned)

    def steady(self, other_waits: OtherWaits = NO_OTHER_WAITS) -> Steady:
        return Steady(1.0, 1.0, 0.5, 1.0, 1.0, True, True, True, 0.0, 2, 0, 4096, 0, 3.0, 2.0)

    def close(self) -> None:
        self.steps = 0
        if self.stuck:
            raise zmq.ZMQError(zmq.ENOTSOCK)


def anything(assign: Assign) -> None:
    """Accept any plan: made-up models have shapes that no kernel could compute."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--listen", default="127.0.0.1:0")
    parser.add_argument("--name", default="fake")
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--attached", action="store_true")
    parser.add_argument("--yields", type=float, help="seconds of silence after which another master is served")
    parser.add_argument("--keys", type=Path, help="folder of its keys, which then are asked for on loopback, too")
    parser.add_argument("--descriptors", type=int, help="soft limit of open files")
    flags = parser.parse_args()
    if flags.descriptors:
        resource.setrlimit(resource.RLIMIT_NOFILE, (flags.descriptors, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    lease.YIELD_S = flags.yields or lease.YIELD_S
    host, port = split_address(flags.listen, lowest_port=0)
    policy = KeyPolicy(flags.keys, outside=lambda host: True) if flags.keys else None
    options = WorkerOptions(host, port, flags.name, flags.cache, attached=flags.attached, key_policy=policy)
    serve(options, FakeMember, anything)


if __name__ == "__main__":
    main()
