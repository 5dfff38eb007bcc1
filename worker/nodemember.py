"""The real member: a `Node` as the daemon sees it."""

from collections.abc import Sequence

from allreduce.base import Endpoints
from tpi.messages import Assign, Stats, Step
from worker.build import build_node
from worker.image import HeldBlock
from worker.member import Figures
from worker.node import Node
from worker.profile import peak_rss


class NodeMember:
    """A node's shard with its KV, window and group; the contract is `worker.member.Member`."""

    def __init__(self, node: Node, resident_bytes: int) -> None:
        self.node = node
        self._resident_bytes = resident_bytes

    @property
    def kv_blocks(self) -> int:
        """Size of the KV pool."""
        return self.node.shard.kv.blocks

    @property
    def progress(self) -> int:
        """Blocks computed so far."""
        return self.node.shard.progress

    def run(self, step: Step) -> None:
        """Forget the released sequences, then run the step."""
        self.node.run(step)

    def figures(self) -> Figures:
        """Totals of the clock, the group and the window."""
        clock, group = self.node.shard.clock, self.node.shard.group.stats
        return Figures(
            steps=clock.steps,
            compute_s=max(0.0, clock.compute),
            sync_s=clock.sync,
            stall_s=clock.stall,
            sent_bytes=group.sent_bytes,
            received_bytes=group.received_bytes,
            resident_bytes=self._resident_bytes,
            dropped=group.dropped,
        )

    def stats(self, session: int, epoch: int) -> Stats:
        """The totals as rank 0 reports them to itself."""
        figures = self.figures()
        return Stats(
            session, epoch, figures.steps, self.node.shard.clock.tokens, self._resident_bytes, figures.resident_bytes,
            peak_rss(), figures.compute_s, figures.sync_s, figures.stall_s, figures.streamed_bytes, figures.disk_s,
            figures.sent_bytes, figures.received_bytes, figures.dropped,
        )  # fmt: skip

    def close(self) -> None:
        """Stop the loader and close the collective's sockets."""
        self.node.close()


def build_member(assign: Assign, held: Sequence[HeldBlock], endpoints: Endpoints) -> NodeMember:
    """A node for the plan. Errors as `worker.build.build_node`."""
    resident = sum(block.extent.nbytes for block in held)
    return NodeMember(build_node(assign, held, endpoints), resident)
