"""Opening of a node's weights: load the resident ones, and open windows, rings and predictors for the others."""

from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

from scheduler.weights import Arrangement, Weights
from scheduler.window.window import Window
from tpi.devices.base import Device
from tpi.kernels.kv import States, states_for
from tpi.progress import Progress
from tpi.trace import OFF, ON, NoTrace
from worker.node.allocations import DeviceAllocations
from worker.node.segment import Segment, open_segment
from worker.node.weights.sources import Sources, arrange, load_kept, open_pages, open_window, parts, traced
from worker.node_plan import NodePlan
from worker.plan.case import Mode
from worker.plan.residence import Residence
from worker.plan.segments import NodeSegment
from worker.shards.image import HeldBlock

if TYPE_CHECKING:
    from worker.accelerator.accelerated import Accelerators
    from worker.demand.fetched import DemandExperts
    from worker.demand.records.node import DemandNeurons
    from worker.neurons.sparse import SparseNode
    from worker.plan.modes.experts import HostSlots
    from worker.plan.records import RecordPlan

_ACCELERATED: dict[Mode, tuple[str, str]] = {
    "offload": ("worker.accelerator.accelerated", "Accelerators"),
    "experts": ("worker.demand.accelerated", "ExpertAccelerated"),
    "neurons": ("worker.neurons.accelerated", "NeuronAccelerated"),
    "batch": ("worker.pipelines.accelerated", "BatchAccelerated"),
}
"""The class that opens the accelerators of each mode. Its module is imported when it is needed."""


@dataclass(frozen=True)
class OpenedWeights:
    """The weights of a node, ready to compute with."""

    weights: Weights[Segment]
    link: "Accelerators | None" = None  # the accelerators
    fetched: "DemandExperts | None" = None  # the experts that are loaded on demand
    sparse: "SparseNode | None" = None  # predicts the active neurons


def open_weights(
    stack: ExitStack,
    plan: NodePlan,
    residence: Residence,
    held: Sequence[HeldBlock],
    devices: Sequence[Device],
    trace: NoTrace,
    progress: Progress,
) -> OpenedWeights:
    """Load the resident weights of a node, and open everything that provides the others.

    The errors are those of `worker.node.build.build_node`.

    Args:
        stack: gets everything that is opened, readers last, so that it closes readers first.
        plan: the plan of the node.
        residence: says which weights are resident, and where.
        held: the images of the plan's blocks.
        devices: the devices of the node, the host first.
        trace: records the spans of loads and computations.
        progress: called for each resident segment that is loaded.
    """
    opening = _Opening(stack, plan, residence, held, devices, trace, progress)
    if residence.mode == "experts" and residence.offload is None:
        return opening.with_experts_fetched(residence.details)
    if residence.mode == "neurons" and residence.offload is None:
        return opening.with_neurons_read(residence.details)
    return opening.dense() if opening.sparse is None else opening.with_neurons_chosen(opening.sparse)


class _Opening:
    """The windows, rings, resident segments and pages of a node, opened one after the other.

    One of the public methods then combines them into the node's weights. The node's mode determines which method.
    """

    def __init__(
        self,
        stack: ExitStack,
        plan: NodePlan,
        residence: Residence,
        held: Sequence[HeldBlock],
        devices: Sequence[Device],
        trace: NoTrace,
        progress: Progress,
    ) -> None:
        self._stack, self._plan, self._residence, self._held = stack, plan, residence, held
        self._devices, self._trace, self._progress = devices, trace, progress
        allocations = stack.enter_context(closing(DeviceAllocations()))
        self._link = self._linked(allocations)
        window = open_window(plan, residence, held, devices[-1], trace, progress)
        self._window: Window = stack.enter_context(closing(window))
        kept = load_kept(plan, residence, held, devices, allocations)
        if self._link is not None:
            self._link.open_rings(self._window)
        self._sources = Sources(self._window, kept, self._link)
        self._pages = open_pages(plan, residence.budget.pages, self._link)
        self._states = States.allocate(plan.state_sizes, states_for(residence.budget.pages))
        self.sparse = self._chosen()

    def dense(self) -> OpenedWeights:
        """Return the weights of a node that computes every unit of each block."""
        places, offload = self._residence.places, self._residence.offload
        long = arrange(places.long, self._sources.of(short=False), self._open)
        alike = places.short == places.long
        short = long if alike else arrange(places.short, self._sources.of(short=True), self._open)
        weights = Weights(self._window, long, short, offload.crossover if offload else 1, self._link)
        return OpenedWeights(weights, self._link)

    def with_neurons_chosen(self, sparse: "SparseNode") -> OpenedWeights:
        """Return the weights of a node that holds them in the host's window, and computes only neurons that `sparse`
        predicts.
        """
        long = arrange(self._residence.places.long, self._sources, self._open, waits=True)
        if self._window.kept is not None:
            sparse.measure(long)
        return OpenedWeights(Weights(self._window, long, steps=sparse), sparse=sparse)

    def with_experts_fetched(self, slots: "HostSlots") -> OpenedWeights:
        """Return the weights of a node that loads routed experts on demand into a cache, and computes all other
        units.
        """
        from worker.demand.fetched import DemandExperts

        reads, disk, verify = self._window.reads, self._residence.disk, self._plan.options.verify_weights
        fetched = self._stack.enter_context(closing(DemandExperts(slots, self._held, disk, reads, self._trace, verify)))
        always = parts(self._residence.places.long, self._sources, self._open)
        arrangement = Arrangement(always, None, fetched.blocks(always, self._open))
        return OpenedWeights(Weights(self._window, arrangement, steps=fetched), fetched=fetched)

    def with_neurons_read(self, records: "RecordPlan") -> OpenedWeights:
        """Return the weights of a node that reads predicted active neurons from disk one by one, into the slots of
        `records`.
        """
        assert self.sparse is not None  # a plan that reads single neurons has predictors
        streamed = self._streamed(records, self.sparse)
        tiles = parts(self._residence.places.long, self._sources, self._open)
        arrangement = Arrangement(tiles, None, streamed.blocks(self._plan.blocks, tiles, self._open))
        return OpenedWeights(Weights(self._window, arrangement, steps=streamed), sparse=self.sparse)

    def _linked(self, allocations: DeviceAllocations) -> "Accelerators | None":
        if self._residence.offload is None:
            return None
        module, name = _ACCELERATED[self._residence.mode]
        opened: Accelerators = getattr(import_module(module), name)(
            self._devices, self._plan, self._residence, allocations, self._trace
        )
        return self._stack.enter_context(closing(opened))

    def _chosen(self) -> "SparseNode | None":
        """Return the opened predictors of active neurons; None if there are none, or if they are on accelerators."""
        if not self._plan.predictors or self._link is not None:
            return None
        from worker.neurons.sparse import open_sparse

        return open_sparse(self._plan, self._held, self._devices[0])

    def _streamed(self, records: "RecordPlan", sparse: "SparseNode") -> "DemandNeurons":
        """Open the reader of single neurons, and fill its slots with the most frequently active neurons.

        If neurons on demand alternate with the plain window, the slots are filled at the first change instead.
        """
        from worker.demand.records.node import DemandNeurons

        window = self._window
        if self._plan.options.verify_weights:
            for number in sorted(set(range(len(records.segments))) - window.placement.resident):
                with window.hold(number):  # the first read compares the bytes with their hashes
                    pass
        streamed = self._stack.enter_context(closing(DemandNeurons(records, sparse, window, self._trace)))
        if records.plain_placement is None:
            streamed.fill(self._progress)
        return streamed

    def _open(self, segment: NodeSegment) -> Segment:
        block, device = segment.block, self._devices[segment.device]
        runs = [(run.layout, run.units) for run in segment.runs]
        name = f"{block.name}{ON}{device.name}" if segment.device > 1 else block.name
        launch = traced(device, self._trace, name) if segment.device and self._trace is not OFF else None
        vectors, pages = self._held[block.source].vectors, self._pages(segment.device, block.layer)
        states = self._states.layers.get(block.layer)
        source = self._plan.kv_source(block)
        opened = open_segment(device, self._plan.config, block.layer, runs, vectors, pages, launch, states, source)
        if self.sparse is not None and not segment.device:
            return self.sparse.adapt_segment(opened, block.layer, segment.neurons_before)
        if self._link is None:
            return opened
        if segment.device:
            return self._link.adapt_segment(opened)
        return self._link.adapt_host_segment(opened, block.layer, block.name)
