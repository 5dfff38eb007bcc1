"""What the daemon needs of whatever computes: the seam between the control plane and the shard.

`NodeMember` is the real one; tests put others in its place.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from allreduce.base import Endpoints
from tpi.messages import Assign, Step
from worker.image import HeldBlock


@dataclass(frozen=True)
class Figures:
    """Totals since the member was built. Seconds, bytes, counts."""

    steps: int = 0
    compute_s: float = 0.0
    sync_s: float = 0.0
    stall_s: float = 0.0
    streamed_bytes: int = 0
    disk_s: float = 0.0
    sent_bytes: int = 0
    received_bytes: int = 0
    resident_bytes: int = 0
    dropped: int = 0


class Member(Protocol):
    """A node's shard of one plan, ready to run steps."""

    @property
    def kv_blocks(self) -> int:
        """Size of the KV pool."""

    @property
    def progress(self) -> int:
        """Grows whenever anything got done; read from another thread."""

    def run(self, step: Step) -> None:
        """Forget the released sequences, then run the step."""

    def figures(self) -> Figures:
        """Totals so far."""

    def close(self) -> None:
        """Give everything back; may be called after a failed step."""


Build = Callable[[Assign, Sequence[HeldBlock], Endpoints], Member]
"""Makes a member of a plan. The blocks are those of `assign.blocks`, in that order."""
