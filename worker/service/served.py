"""The interface between a worker's daemon and the node that computes.

`worker.node.node.Node` implements it; tests have other implementations.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from allreduce.base import Endpoints
from scheduler.model.timeline import NO_OTHER_WAITS, OtherWaits
from scheduler.window.stats import WindowPosition
from tpi.net.messages import (
    Assign,
    Step,
)
from tpi.net.questions import Stats, Steady
from tpi.progress import Progress
from tpi.trace import NoTrace
from worker.profile import peak_rss
from worker.shards.image import HeldBlock


@dataclass(frozen=True)
class Figures:
    """Counters of a node since it was built: numbers, bytes, and seconds (names that end with `_s`)."""

    steps: int = 0
    tokens: int = 0
    weight_bytes: int = 0
    compute_s: float = 0.0
    sync_s: float = 0.0
    hop_s: float = 0.0  # waiting for the hidden states of other stages
    stall_s: float = 0.0
    streamed_bytes: int = 0
    disk_s: float = 0.0
    sent_bytes: int = 0
    received_bytes: int = 0
    resident_bytes: int = 0
    planned_bytes: int = 0  # above the bare process: weights, KV, activations, buffers
    dropped: int = 0
    accelerator: str = ""  # one sentence about the work of the accelerator, or about demand loading


class ServedNode(Protocol):
    """A node's shard of one plan, ready to run steps."""

    @property
    def pages(self) -> int:
        """Size of the KV cache in pages."""

    @property
    def prefill_tokens(self) -> int:
        """Tokens of the longest step that the node's memory allows."""

    @property
    def progress(self) -> int:
        """A count that grows whenever the node makes progress; read by another thread."""

    @property
    def position(self) -> WindowPosition:
        """Position of the memory window; read by another thread."""

    @property
    def trace(self) -> NoTrace:
        """The recorder of the node's spans."""

    def run(self, step: Step) -> object:
        """Forget the released sequences, then run the step."""

    def figures(self) -> Figures:
        """Return the counters of the node's work since it was built."""

    def steady(self, other_waits: OtherWaits = NO_OTHER_WAITS) -> Steady | None:
        """Return whether the node waits for its disk, and which placement would end that; None if it streams nothing.

        The call may take seconds. `other_waits` has the waits for disks, in seconds per token, that are not for this
        node's blocks.
        """

    def close(self) -> None:
        """Release all resources; may be called after a failed step."""


def totals(session: int, epoch: int, figures: Figures, steady: Steady | None, dropped: int = 0) -> Stats:
    """Return a node's figures as a message for the master.

    `dropped` is the number of messages that the process dropped in addition to those in `figures`.
    """
    return Stats(
        session, epoch, figures.steps, figures.tokens,
        figures.weight_bytes, figures.resident_bytes, figures.planned_bytes, peak_rss(),
        figures.compute_s, figures.sync_s, figures.hop_s, figures.stall_s, figures.streamed_bytes, figures.disk_s,
        figures.sent_bytes, figures.received_bytes, figures.dropped + dropped, steady, figures.accelerator,
    )  # fmt: skip


Build = Callable[[Assign, Sequence[HeldBlock], Endpoints, Progress], ServedNode]
"""A function that builds the node of a plan. The blocks are those of `assign.blocks`, in the same order."""
