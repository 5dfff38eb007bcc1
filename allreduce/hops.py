"""Hops: hidden states on their way from one stage to the next, and from the last one to the master.

The nodes of a stage sum within the stage. The lowest rank of a stage, its *leader*, has the last sum and sends it to
every node of the next stage. Each hop has a lane of its own, so that a node can send the hidden states of a later step
while it still waits for an earlier one.
"""

from collections.abc import Sequence
from time import perf_counter

import numpy as np

from allreduce._mailbox import Mailbox
from allreduce.base import F32
from allreduce.connections import STEP_MASK, Connections
from tpi.kernels.constants import STREAM_TOKENS
from tpi.net.wire import EXACT, Wire, wire_format

MASTER_RANK = 0


def sums_lane(stage: int) -> int:
    """Return the lane of the sums within stage number `stage`."""
    return 2 * stage


def _leaving_lane(stage: int) -> int:
    """Return the lane of the hidden states that leave stage number `stage`."""
    return 2 * stage + 1


class Hops:
    """The hops that one node takes part in. Only one thread at a time may use them.

    `seconds` is the total time of waits for hidden states.
    """

    def __init__(self, connections: Connections, stages: Sequence[Sequence[int]], hidden: int, wire: str) -> None:
        """Connect this node to the stages before and after each of its own.

        Args:
            connections: this node's connections to the other nodes.
            stages: the ranks of each stage, in ascending order.
            hidden: the number of values in a hidden state.
            wire: the wire format of partial results. Hidden states of long steps travel in it too, but in bf16 instead
                of q8, which would lose as much precision as 4-bit weights. Hidden states of short steps travel in f32,
                so that a token has the same bits as on one node.
        """
        rank, last = connections.spec.rank, len(stages) - 1
        everyone = range(connections.spec.size)
        own = [number for number, ranks in enumerate(stages) if rank in ranks]
        self.connections = connections
        self._hidden = hidden
        self._long = wire_format("bf16" if wire == "q8" else wire)
        self.seconds = 0.0
        self._entering: dict[int, tuple[Mailbox, int]] = {}  # by stage, with the rank that sends
        self._leaving: dict[int, tuple[Mailbox, tuple[int, ...]]] = {}  # by stage, with the ranks that receive
        # on the master: the mailbox for the last stage's result, and the sender
        self._returning: tuple[Mailbox, int] | None = None
        for stage in own:
            if stage:
                self._entering[stage] = connections.open(_leaving_lane(stage - 1), everyone), stages[stage - 1][0]
            after = tuple(stages[stage + 1]) if stage < last else (MASTER_RANK,)
            if rank == stages[stage][0] and after != (rank,):
                self._leaving[stage] = connections.open(_leaving_lane(stage), everyone), after
        if rank == MASTER_RANK and last not in own:
            self._returning = connections.open(_leaving_lane(last), everyone), stages[last][0]
        sending = [sender for _, sender in (*self._entering.values(), *filter(None, [self._returning]))]
        connections.connect({*sending, *(each for _, after in self._leaving.values() for each in after)})

    def enter(self, stage: int | None, step: int, given: F32, rows: int) -> F32:
        """Return the hidden states `[rows, hidden]` that enter this node's `stage`.

        In the first stage, and on a node without a stage, return `given`.

        Raises:
            NodeLost: if the stage before does not send the hidden states in time.
        """
        return given if not stage else self._receive(*self._entering[stage], step, rows)

    def leave(self, stage: int | None, step: int, x: F32 | None) -> None:
        """Send the hidden states `x` `[rows, hidden]` from `stage` to the next stage.

        `x` is None on nodes other than the stage's leader.

        Raises:
            NodeLost: if a node does not accept the hidden states in time.
        """
        if stage in self._leaving and x is not None:
            box, after = self._leaving[stage]
            box.begin(step & STEP_MASK)
            box.send(after, 0, x, self._format(len(x)).code)

    def result(self, step: int, own: F32 | None, rows: int) -> F32 | None:
        """Return the hidden states `[rows, hidden]` after the last stage on the master, and None on other nodes.

        `own` are the hidden states after this node's own stage.

        Raises:
            NodeLost: if the last stage does not send the hidden states in time.
        """
        if self.connections.spec.rank != MASTER_RANK:
            return None
        return own if self._returning is None else self._receive(*self._returning, step, rows)

    @property
    def traffic(self) -> tuple[int, int]:
        """Total bytes that hops have sent and received."""
        hops = (*self._entering.values(), *self._leaving.values(), *filter(None, [self._returning]))
        boxes = [box for box, _ in hops]
        return sum(box.sent_bytes for box in boxes), sum(box.received_bytes for box in boxes)

    def _receive(self, box: Mailbox, rank: int, step: int, rows: int) -> F32:
        started = perf_counter()
        out = np.empty((rows, self._hidden), np.float32)
        box.begin(step & STEP_MASK)
        box.receive(rank, 0, out, self._format(rows).code)
        self.seconds += perf_counter() - started
        return out

    def _format(self, rows: int) -> Wire:
        return EXACT if rows <= STREAM_TOKENS else self._long
