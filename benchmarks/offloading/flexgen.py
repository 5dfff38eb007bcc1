"""FlexGen's schedule for comparison: the device and all transfers are synchronised after every layer.

The schedule follows PIPO's figure 2. A layer begins by requesting the next layer's weights, which are loaded while it
computes. When it has ended, it waits for the load and for all saves.
"""

from types import TracebackType

from scheduler.weights import Arrangement, Hold, Weights
from tpi.devices.pages import Bytes
from worker.accelerator.accelerated import Accelerators
from worker.node.node import Node
from worker.node.segment import Segment


class Schedule:
    """State that the holds of one node share."""

    def __init__(self, link: Accelerators) -> None:
        self._link = link
        self._before: Hold | None = None

    def enter(self, hold: Hold) -> Bytes:
        """Wait for all transfers, then free a slot for the load of the next layer."""
        self._link.wait_idle()
        data = hold.__enter__()
        self._give_back()
        return data

    def leave(self, hold: Hold) -> None:
        """Keep `hold` until the next layer begins, then release its slot."""
        self._before = hold

    def _give_back(self) -> None:
        before, self._before = self._before, None
        if before is not None:
            before.__exit__(None, None, None)


class Synchronised:
    """A hold that synchronises transfers as FlexGen's schedule does."""

    def __init__(self, hold: Hold, schedule: Schedule) -> None:
        self._hold, self._schedule = hold, schedule

    def __enter__(self) -> Bytes:
        return self._schedule.enter(self._hold)

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        self._schedule.leave(self._hold)


def synchronise(node: Node) -> None:
    """Make a node that offloads follow FlexGen's schedule from now on."""
    link, before = node.link, node.loop.weights
    assert link is not None
    schedule = Schedule(link)
    long, short = (_synchronised(arrangement, schedule) for arrangement in (before._long, before._short))
    crossover = node.offload.crossover if node.offload else 1
    node.loop.weights = Weights(before.window, long, short, crossover, link)


def _synchronised(arrangement: Arrangement[Segment], schedule: Schedule) -> Arrangement[Segment]:
    blocks = [[(segment, Synchronised(hold, schedule)) for segment, hold in block.parts] for block in arrangement.holds]
    return Arrangement(blocks, None)
