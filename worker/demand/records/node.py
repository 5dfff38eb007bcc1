"""The records of a node while it runs: their slots, who is told of predictions, and which steps are read by neurons.

With `--sparsity auto` both ways take turns in the same memory: some tokens with the plain window, which keeps what fits
and streams the rest, then some by neurons. To change over takes about a token, since as much is read; what took less is
gone on with.
"""

from collections.abc import Callable, Sequence

from scheduler.demand.records.tier import RecordTier
from scheduler.demand.workers import Readers
from scheduler.storage.openfiles import OpenFilesDisk
from scheduler.weights import Hold
from scheduler.window.switched import SwitchedWindow
from scheduler.window.window import Window
from tpi.devices.pages import page_buffer
from tpi.progress import Progress, silent
from tpi.trace import NoTrace
from worker.demand.records.blocks import RecordFfn, StreamedBlock
from worker.demand.records.plan import RecordPlan
from worker.demand.records.turns import TurnsJudge
from worker.neurons.hybrid import NeuronChoice
from worker.neurons.sparse import SparseFfn, SparseNode
from worker.node.segment import Segment
from worker.plan.node_plan import NodeBlock
from worker.plan.segments import NodeSegment

OpenSegment = Callable[[NodeSegment], Segment]


class StreamedNeurons:
    """The records of a node, its blocks, and what becomes of them. A `scheduler.weights.StepListener`."""

    def __init__(self, plan: RecordPlan, node: SparseNode, window: Window, trace: NoTrace) -> None:
        """`node` says what is active; `window` has the blocks where all of a block is wanted."""
        self._plan, self._node = plan, node
        self._numbers = {block: number for number, block in enumerate(plan.layers)}
        layers, workers = list(plan.layers.values()), Readers(plan.readers)
        self.tier = RecordTier(layers, plan.disk, workers, plan.readers, plan.gap, plan.least, window.reads, trace)
        self._records: dict[int, RecordFfn] = {}  # by layer
        node.foretell, node.records = self._foretell, self.tier
        self._turns: TurnsJudge | None = None
        if isinstance(window, SwitchedWindow):
            node.judge = self._turns = TurnsJudge()
            self._window, self._by_neurons = window, False

    def blocks(
        self, blocks: Sequence[NodeBlock], parts: Sequence[Sequence[tuple[Segment, Hold]]], open_one: OpenSegment
    ) -> dict[int, StreamedBlock]:
        """Those of `blocks` that are read by neurons, by their number; `parts` are what the window has of each."""
        found = {}
        for block in (block for block in blocks if block.number in self._numbers):
            whole = open_one(NodeSegment(block, block.runs))
            assert isinstance(whole, SparseFfn)  # nothing else has neurons that are predicted
            own = RecordFfn(
                whole.device, whole.launch, whole.spec, block.layer, self._numbers[block.number], self.tier, self._node
            )
            found[block.number], self._records[block.layer] = StreamedBlock(parts[block.number], own), own
        return found

    def fill(self, progress: Progress = silent) -> None:
        """Take the memory of the slots, and read what is active most often into them. Errors as `RecordTier.hold`."""
        self.tier.lay(page_buffer(self._plan.slots_bytes))
        self.tier.fill(progress)

    def begin(self, short: bool) -> None:
        """See `scheduler.weights.StepListener`; where both ways take turns it may be another's now."""
        self._node.begin(short)
        if self._turns is not None:
            self._change_over(self._turns.by_neurons)
            self._turns.start()

    def abandon(self) -> None:
        """See `scheduler.weights.StepListener`."""
        self._node.abandon()
        self.tier.abandon()

    def close(self) -> None:
        """Join the readers, and close the files that they read. Idempotent."""
        self.tier.close()
        if isinstance(self._plan.disk, OpenFilesDisk):
            self._plan.disk.close()

    def _change_over(self, by_neurons: bool) -> None:
        """Have the memory used by neurons, or as the plain window does, if it is not."""
        plain = self._plan.plain
        if by_neurons == self._by_neurons or plain is None:
            return
        self.tier.rest()
        self._window.switch(self._plan.placement if by_neurons else plain)
        if by_neurons:
            self.fill()
        self._by_neurons = by_neurons

    def _foretell(self, layer: int, choice: NeuronChoice) -> None:
        """Have what a later layer will want read meanwhile."""
        records = self._records.get(layer)
        if records is not None and records.takes(len(choice.active)):
            self.tier.expect(records.number, choice.active)
