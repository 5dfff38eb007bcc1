"""What the daemon needs of whatever computes: the seam between the control plane and the shard.

`worker.node.node.Node` is the real one; tests put others in its place.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from allreduce.base import Endpoints
from scheduler.model.timeline import NOTHING_ELSE, OtherWaits
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
    """Totals since the node was built. Seconds, bytes, counts."""

    steps: int = 0
    tokens: int = 0
    weight_bytes: int = 0
    compute_s: float = 0.0
    sync_s: float = 0.0
    stall_s: float = 0.0
    streamed_bytes: int = 0
    disk_s: float = 0.0
    sent_bytes: int = 0
    received_bytes: int = 0
    resident_bytes: int = 0
    planned_bytes: int = 0  # above the bare process: weights, KV, activations, buffers
    dropped: int = 0
    accelerator: str = ""  # what it does, in a sentence


class ServedNode(Protocol):
    """A node's shard of one plan, ready to run steps."""

    @property
    def pages(self) -> int:
        """Size of the KV pool."""

    @property
    def prefill_tokens(self) -> int:
        """The longest step that its memory allows."""

    @property
    def progress(self) -> int:
        """Grows whenever anything got done; read from another thread."""

    @property
    def position(self) -> WindowPosition:
        """Where its memory window stands; read from another thread."""

    @property
    def trace(self) -> NoTrace:
        """What it has recorded, if anything."""

    def run(self, step: Step) -> object:
        """Forget the released sequences, then run the step."""

    def figures(self) -> Figures:
        """Totals so far."""

    def steady(self, beside: OtherWaits = NOTHING_ELSE) -> Steady | None:
        """Whether it waits for its disk, and what would end that; None if it streams nothing. Takes long to compute."""

    def close(self) -> None:
        """Give everything back; may be called after a failed step."""


def totals(session: int, epoch: int, figures: Figures, steady: Steady | None, dropped: int = 0) -> Stats:
    """The figures of a node as a message; `dropped` counts what was dropped elsewhere in its process."""
    return Stats(
        session, epoch, figures.steps, figures.tokens,
        figures.weight_bytes, figures.resident_bytes, figures.planned_bytes, peak_rss(),
        figures.compute_s, figures.sync_s, figures.stall_s, figures.streamed_bytes, figures.disk_s,
        figures.sent_bytes, figures.received_bytes, figures.dropped + dropped, steady, figures.accelerator,
    )  # fmt: skip


Build = Callable[[Assign, Sequence[HeldBlock], Endpoints, Progress], ServedNode]
"""Makes a node of a plan. The blocks are those of `assign.blocks`, in that order; what it loads, it reports."""
