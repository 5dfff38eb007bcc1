"""A node with an emulated accelerator, step by step, in the time of the emulated machine."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from master.generation.request import Request
from master.options import RunOptions
from master.session import Session
from master.vocabulary.sampler import Sampler, Sampling
from tpi.devices.emulated.emulation import Emulation
from tpi.devices.options import DeviceOptions, OffloadOptions
from worker.equipment import INTERRUPTED
from worker.plan.offload import OffloadPlan

CONTEXT = 512
_ANSWER = 10_000  # tokens; no run uses more


@dataclass(frozen=True)
class StepTime:
    """The mean seconds of a step on the emulated machine, and the share of that time that each lane was busy."""

    seconds: float
    use: dict[str, float]
    overruns: int  # tasks whose real work took more than half of their slot

    @property
    def busiest(self) -> float:
        """Seconds of the lane that was busy the longest: no schedule takes less."""
        return self.seconds * max(self.use.values())


class EmulatedNode:
    """A session of one node, and the sequences that it answers."""

    def __init__(self, session: Session) -> None:
        self.session = session
        emulation = session.equipment.emulation
        assert emulation is not None
        self.emulation: Emulation = emulation

    @property
    def plan(self) -> OffloadPlan:
        """The offload plan of the node's accelerator."""
        assert self.session.node.offload is not None
        return self.session.node.offload

    def prompt(self, tokens: int, sequences: int = 1) -> StepTime:
        """Compute the prompts of several sequences, of equal length. `tokens` then continues them."""
        engine = self.session.engine
        for number in range(sequences):
            sequence = engine.admit([5 + (number + 7 * at) % 200 for at in range(tokens)])
            engine.submit(Request(sequence, Sampler(Sampling(temperature=0)), _ANSWER, lambda _: True))
        waiting = list(engine.requests)
        return self._timed(lambda: all(request.made for request in waiting))

    def tokens(self, steps: int) -> StepTime:
        """Run `steps` steps of one token per sequence, and return their mean figures."""
        left = iter(range(steps))
        return self._timed(lambda: next(left, None) is None)

    def _timed(self, done: Callable[[], bool]) -> StepTime:
        before = {lane.name: lane.busy for lane in self.emulation.lanes}
        overruns, steps, began = self.emulation.overruns, 0, time.perf_counter()
        while not done():
            self.session.engine.step()
            steps += 1
        total = self.emulation.emulated_seconds(time.perf_counter() - began)
        use = {lane.name: (lane.busy - before[lane.name]) / total for lane in self.emulation.lanes}
        return StepTime(total / steps, use, self.emulation.overruns - overruns)


@contextmanager
def emulated_node(
    model: str, device: str, options: OffloadOptions | None = None, memory: int | None = None, trace: bool = False
) -> Iterator[EmulatedNode]:
    """Open a node of one thread with the emulated `device` (`tpi.devices.emulated.machine`).

    With `trace` the node records its spans.

    Raises:
        EmulationError: at the end, if real work decided how long tasks took: the machine is too busy for the benchmark.
    """
    devices = DeviceOptions((device,), (), options or OffloadOptions())
    spans = Path(os.devnull) if trace else None
    with Session(RunOptions(model, context=CONTEXT, threads=1, memory=memory, devices=devices, trace=spans)) as session:
        node = EmulatedNode(session)
        yield node
        node.emulation.check(INTERRUPTED)
