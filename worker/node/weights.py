"""Opening of a node's weights: load the resident ones, and open windows, rings and predictors for the others."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING

from scheduler.model.placement import Placement
from scheduler.slots.stats import ReadClock
from scheduler.weights import Arrangement, Demanded, Hold, StepListener, Weights
from scheduler.window.load import Verify
from scheduler.window.switched import SwitchedWindow
from scheduler.window.window import MemoryWindow, Resident, Window
from tpi.devices.base import Device
from tpi.devices.pages import Bytes
from tpi.kernels.kv import KvPages, States, states_for
from tpi.progress import Progress
from tpi.trace import ON, NoTrace
from worker.node.allocations import DeviceAllocations
from worker.node.segment import HeldPages, Segment, launching, open_segment
from worker.node_plan import NodePlan
from worker.plan.case import Mode
from worker.plan.checksums import Checksums
from worker.plan.places import Visits
from worker.plan.residence import Residence
from worker.plan.segments import NodeSegment
from worker.shards.image import HeldBlock

if TYPE_CHECKING:
    from worker.accelerator.accelerated import Accelerators
    from worker.demand.fetched import DemandExperts
    from worker.neurons.sparse import SparseNode

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
    sparse = None
    if plan.predictors and residence.offload is None:
        from worker.neurons.sparse import open_sparse

        sparse = open_sparse(plan, held, devices[0])
    opening = _Opening(stack, plan, residence, held, devices, trace, progress, sparse)
    window, places, offload = opening.window, residence.places, residence.offload
    parts = opening.parts(places.long)
    demanded: Mapping[int, Demanded[Segment]] | None = None
    steps: StepListener | None = opening.link or sparse
    fetched = None
    if offload is None and residence.mode == "experts":
        from worker.demand.fetched import DemandExperts

        verify = plan.options.verify_weights
        fetched = DemandExperts(residence.details, held, window.reads, trace, verify)
        steps = stack.enter_context(closing(fetched))
        demanded = fetched.blocks(parts, opening.segment)
    elif offload is None and residence.mode == "neurons":
        from worker.demand.records.node import DemandNeurons

        assert sparse is not None  # a plan that reads single neurons has predictors
        neurons = DemandNeurons(residence.details, sparse, window, trace)
        steps = stack.enter_context(closing(neurons))
        neurons.load(plan.options.verify_weights, progress)
        demanded = neurons.blocks(plan.blocks, parts, opening.segment)
    long = Arrangement(parts, None if sparse else opening.on_one_device(places.long), demanded)
    short = None
    if places.short != places.long:
        short = Arrangement(opening.parts(places.short, short=True), opening.on_one_device(places.short))
    if steps is sparse and sparse is not None and window.kept is not None:
        if sparse.pays(long):
            sparse.measure(long)
        else:  # segments are now opened as those of a node without predictors
            long, steps = Arrangement(opening.parts(places.long), opening.on_one_device(places.long)), None
    weights = Weights(window, long, short, offload.crossover if offload else 1, steps)
    return OpenedWeights(weights, opening.link, fetched, sparse)


class _Opening:
    """The accelerators, window, resident segments and pages of a node, from which its segments are opened."""

    def __init__(
        self,
        stack: ExitStack,
        plan: NodePlan,
        residence: Residence,
        held: Sequence[HeldBlock],
        devices: Sequence[Device],
        trace: NoTrace,
        progress: Progress,
        sparse: "SparseNode | None",
    ) -> None:
        """Open them one after the other. `sparse` predicts the host's active neurons, if it is not None."""
        self._plan, self._held, self._devices, self._trace, self._sparse = plan, held, devices, trace, sparse
        allocations = stack.enter_context(closing(DeviceAllocations()))
        self.link: Accelerators | None = None
        if residence.offload is not None:
            module, name = _ACCELERATED[residence.mode]
            accelerated = getattr(import_module(module), name)
            self.link = stack.enter_context(closing(accelerated(devices, plan, residence, allocations, trace)))
        self.window = stack.enter_context(closing(_window(plan, residence, held, devices[-1], trace, progress)))
        self._kept = _load_kept(plan, residence, held, devices, allocations)
        if self.link is not None:
            self.link.open_rings(self.window)
        self._pages = _open_pages(plan, residence.budget.pages, self.link)
        self._states = States.allocate(plan.state_sizes, states_for(residence.budget.pages))

    def parts(self, visits: Visits, short: bool = False) -> list[list[tuple[Segment, Hold]]]:
        """Return the segments of every block, each with the context manager that yields its bytes.

        Args:
            visits: the segments to compute, by block in order of use.
            short: True for the segments of short steps.
        """
        return [[self._part(segment, short) for segment in block] for block in visits]

    def segment(self, segment: NodeSegment) -> Segment:
        """Return the segment that a device computes, for `segment` of the plan."""
        block, device = segment.block, self._devices[segment.device]
        runs = [(run.layout, run.units) for run in segment.runs]
        name = f"{block.name}{ON}{device.name}" if segment.device > 1 else block.name
        launch = launching(device, self._trace, name) if segment.device else device.start
        vectors, pages = self._held[block.source].vectors, self._pages(segment.device, block.layer)
        states = self._states.layers.get(block.layer)
        source = self._plan.kv_source(block)
        opened = open_segment(device, self._plan.config, block.layer, runs, vectors, pages, launch, states, source)
        if self._sparse is not None:
            return self._sparse.adapt_segment(opened, block.layer, segment.neurons_before)
        if self.link is None:
            return opened
        if segment.device:
            return self.link.adapt_segment(opened)
        return self.link.adapt_host_segment(opened, block.layer, block.name)

    def on_one_device(self, visits: Visits) -> Sequence[Bytes] | None:
        """Return the bytes of all segments, in order of use, if one device holds them and keys and values; else None.

        Only then can the blocks run as a chain.
        """
        segments = [segment for block in visits for segment in block]
        if all(segment.memory == "window" for segment in segments):
            return self.window.kept
        alike = {(segment.memory, segment.device) for segment in segments}
        if len(alike) > 1 or segments[0].memory != "kept" or self.link is None or not self.link.chains:
            return None
        return [self._kept[segment.number] for segment in segments]

    def _part(self, segment: NodeSegment, short: bool) -> tuple[Segment, Hold]:
        opened = self.segment(segment)
        if not segment.parts:
            return opened, self._hold(segment, short)
        assert self.link is not None  # only accelerators have segments in several places
        return self.link.gather(opened, [(part, self._hold(part, short)) for part in segment.parts])

    def _hold(self, segment: NodeSegment, short: bool) -> Hold:
        """Return a context manager that yields the bytes of `segment`."""
        if segment.memory == "window":
            return self.window.hold(segment.number)
        if segment.memory == "kept":
            return nullcontext(self._kept[segment.number])
        assert self.link is not None  # all other segments pass through its rings
        return self.link.hold(segment.number, short)


def _window(
    plan: NodePlan,
    residence: Residence,
    held: Sequence[HeldBlock],
    reader: Device,
    trace: NoTrace,
    progress: Progress,
) -> Window:
    """Open the memory window of the host: all weights if they fit, else a ring that is filled from the disk.

    Its memory is allocated by `reader`, the device that copies from it, so that the copies run at full speed.
    """
    extents, placement = residence.extents, residence.placement
    verify: Verify | None = Checksums(residence.segments, held) if plan.options.verify_weights else None
    if not placement.streamed_bytes:
        return Resident(extents, residence.disk, verify, progress, reader.staging)

    def make(placed: Placement, reads: ReadClock | None = None) -> MemoryWindow:
        return MemoryWindow(extents, placed, residence.disk, verify, trace, reads=reads, memory=reader.staging)

    if residence.mode == "neurons" and residence.offload is None and residence.details.plain_placement is not None:
        return SwitchedWindow(make, placement, progress)
    window = make(placement)
    try:
        window.fill(progress)
    except BaseException:
        window.close()
        raise
    return window


def _load_kept(
    plan: NodePlan,
    residence: Residence,
    held: Sequence[HeldBlock],
    devices: Sequence[Device],
    allocations: DeviceAllocations,
) -> list[Bytes]:
    """Load the segments that are resident in the memory of their devices, and return the bytes of each."""
    kept = residence.places.kept
    verify = Checksums(kept, held) if plan.options.verify_weights else None
    return [
        allocations.load(
            devices[segment.device],
            segment.pieces(held),
            residence.disk,
            partial(verify, number) if verify is not None else None,
        )
        for number, segment in enumerate(kept)
    ]


def _open_pages(plan: NodePlan, count: int, link: "Accelerators | None") -> Callable[[int, int], HeldPages]:
    """Return a function that takes the number of a device and that of a layer, and returns the layer's KV pages there.

    With accelerators (`link`), return the pages that these have allocated. Otherwise allocate `count` pages in the
    host's memory.
    """
    if link is not None:
        return lambda device, layer: link.pages(layer) if device else link.host_pages
    heads = {layer: (each.kv_heads, each.head_dim) for layer, each in plan.layer_heads.items()}
    pages = KvPages.of_layers(heads, count, plan.options.kv_dtype)
    return lambda device, layer: pages
