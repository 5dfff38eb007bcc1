"""The on-demand neurons of a running node: their slots, their prefetches, and which steps use them.

With `--sparsity auto` two ways take turns in the same memory: some steps with the plain window (resident blocks, and
a ring for the others), then some with neurons on demand. Changing over reads about as much as one token of the
plain window. The faster way is then used for all further steps.
"""

from collections.abc import Callable, Sequence

from scheduler.demand.records.tier import RecordTier
from scheduler.slots.workers import Readers
from scheduler.storage.openfiles import OpenFilesDisk
from scheduler.weights import Hold
from scheduler.window.switched import SwitchedWindow
from scheduler.window.window import Window
from tpi.devices.pages import page_buffer
from tpi.progress import Progress, silent
from tpi.trace import NoTrace
from worker.demand.records.blocks import DemandBlock, DemandFfn
from worker.demand.records.turns import TurnsJudge
from worker.neurons.hybrid import NeuronChoice
from worker.neurons.sparse import SparseFfn, SparseNode
from worker.node.segment import Segment
from worker.node_plan import NodeBlock
from worker.plan.records import RecordPlan
from worker.plan.segments import NodeSegment

OpenSegment = Callable[[NodeSegment], Segment]


class DemandNeurons:
    """The on-demand neurons of a node and the blocks that use them; a `scheduler.weights.StepListener`."""

    def __init__(self, plan: RecordPlan, node: SparseNode, window: Window, trace: NoTrace) -> None:
        """Create the cache of the neurons in `plan`.

        `node` predicts which neurons are active. `window` provides whole blocks. If it is a `SwitchedWindow`, the two
        ways take turns.
        """
        self._plan, self._node = plan, node
        self._numbers = {block: number for number, block in enumerate(plan.layers)}
        layers, workers = list(plan.layers.values()), Readers(plan.readers)
        self.tier = RecordTier(
            layers, plan.disk, workers, plan.readers, plan.gap, plan.min_read_bytes, window.reads, trace
        )
        self._records: dict[int, DemandFfn] = {}  # by layer
        node.on_prediction, node.records = self._prefetch, self.tier
        self._window, self._by_neurons = window, False  # the latter counts only if the two ways take turns
        self._turns: TurnsJudge | None = None
        if isinstance(window, SwitchedWindow):
            node.judge = self._turns = TurnsJudge()

    def blocks(
        self, blocks: Sequence[NodeBlock], parts: Sequence[Sequence[tuple[Segment, Hold]]], open_one: OpenSegment
    ) -> dict[int, DemandBlock]:
        """Return the blocks of `blocks` whose neurons are read on demand, by block number.

        `parts` are the segments and holds of each block in the window; `open_one` opens a segment.
        """
        found = {}
        for block in (block for block in blocks if block.number in self._numbers):
            whole = open_one(NodeSegment(block, block.runs))
            assert isinstance(whole, SparseFfn)  # only these have predicted neurons
            own = DemandFfn(
                whole.device, whole.launch, whole.spec, block.layer, self._numbers[block.number], self.tier, self._node
            )
            found[block.number], self._records[block.layer] = DemandBlock(parts[block.number], own), own
        return found

    def load(self, verify: bool, progress: Progress) -> None:
        """Fill the slots, unless the two ways take turns. Then they are filled at the first change.

        If `verify` is True, first read each block that the window streams: a block's first read compares its bytes with
        their hashes. Errors are those of `fill` and of `Window.hold`.
        """
        window = self._window
        if verify:
            for number in sorted(set(range(len(self._plan.segments))) - window.placement.resident):
                with window.hold(number):
                    pass
        if self._plan.plain_placement is None:
            self.fill(progress)

    def fill(self, progress: Progress = silent) -> None:
        """Allocate the memory of the slots, and read the most frequently active neurons into them.

        A failed read raises the same errors as `RecordTier.hold`.
        """
        self.tier.attach(page_buffer(self._plan.slots_bytes))
        self.tier.fill(progress)

    def begin(self, short: bool) -> None:
        """Begin a step. If the two ways alternate and the other one is due, change over first."""
        self._node.begin(short)
        if self._turns is not None:
            self._change_over(self._turns.by_neurons)
            self._turns.start()

    def abandon(self) -> None:
        """Abandon the current step after a failure, with its predictions and reads."""
        self._node.abandon()
        self.tier.abandon()

    def close(self) -> None:
        """Join the reader threads, and close their files. Further calls do nothing."""
        self.tier.close()
        if isinstance(self._plan.disk, OpenFilesDisk):
            self._plan.disk.close()

    def _change_over(self, by_neurons: bool) -> None:
        """Give the memory to slots of single neurons if `by_neurons` is True, else to the plain window.

        Do nothing if the memory is already used in this way.
        """
        plain = self._plan.plain_placement
        if by_neurons == self._by_neurons or plain is None:
            return
        self.tier.detach()
        assert isinstance(self._window, SwitchedWindow)  # it has a plain placement
        self._window.switch(self._plan.placement if by_neurons else plain)
        if by_neurons:
            self.fill()
        self._by_neurons = by_neurons

    def _prefetch(self, layer: int, choice: NeuronChoice) -> None:
        """Start to read the neurons `choice` of a later layer, if the layer has slots for all of them."""
        records = self._records.get(layer)
        if records is not None and records.has_slots_for(len(choice.active)):
            self.tier.expect(records.number, choice.active)
