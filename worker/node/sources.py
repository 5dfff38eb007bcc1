"""Where a node's segments come from: the host's window, the memory of their device, the ring of an accelerator."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from scheduler.model.placement import Placement
from scheduler.weights import Arrangement, Hold, Weights
from scheduler.window.load import Verify
from scheduler.window.stats import ReadClock
from scheduler.window.switched import SwitchedWindow
from scheduler.window.window import MemoryWindow, Resident, Window
from tpi.devices.base import Device, Pending
from tpi.kv import KvPages
from tpi.progress import Progress
from tpi.trace import OFF, ON, NoTrace
from worker.node.placed import Placed
from worker.node.segment import HeldPages, Launch, Segment, open_segment
from worker.plan.checksums import Checksums
from worker.plan.node_plan import NodePlan
from worker.plan.places import Place, Visits
from worker.plan.residence import Residence
from worker.plan.segments import NodeSegment
from worker.shards.image import HeldBlock

if TYPE_CHECKING:
    from worker.accelerator.accelerated import Accelerated
    from worker.demand.fetched import Fetched
    from worker.demand.records.node import StreamedNeurons
    from worker.demand.records.plan import RecordPlan
    from worker.neurons.gated import GatedNode
    from worker.neurons.sparse import SparseNode


def open_weights(
    stack: ExitStack,
    plan: NodePlan,
    residence: Residence,
    held: Sequence[HeldBlock],
    devices: Sequence[Device],
    trace: NoTrace,
    progress: Progress,
    gated: "GatedNode | None" = None,
) -> tuple[Weights[Segment], "Accelerated | None", "Fetched | None", "SparseNode | None"]:
    """The weights of a node, loaded where they stay, its accelerator, and who chooses of them; `stack` closes them.

    `devices` are the node's, the host first; `gated` has neurons chosen by their gate, on the host. Errors as
    `worker.node.build.build_node`.
    """
    placed = stack.enter_context(closing(Placed()))
    link = None
    if residence.offload is not None:
        from worker.pipelines.accelerated import open_accelerated

        link = stack.enter_context(closing(open_accelerated(devices, plan, residence, placed, trace)))
    window = stack.enter_context(
        closing(_window(plan, residence, held, devices[-1], trace, progress))
    )  # closed first: it is read
    kept = _load_kept(plan, residence, held, devices, placed)
    if link is not None:
        link.open_rings(window)
    sources = _Sources(window, kept, link)
    pages = _pages(plan, residence, devices, placed, link)

    sparse, fetched = None, None
    if plan.predictors and link is None:
        from worker.neurons.sparse import open_sparse

        sparse = open_sparse(plan, held, devices[0])
    if residence.demand is not None:
        from worker.demand.fetched import Fetched

        verify = plan.options.verify_weights
        fetched = stack.enter_context(
            closing(Fetched(residence.demand, held, residence.disk, window.reads, trace, verify))
        )

    def open_one(segment: NodeSegment) -> Segment:
        runs = [(run.layout, run.units) for run in segment.runs]
        block = segment.block
        vectors = held[block.source].vectors
        device, own = devices[segment.device], pages(segment.device, block.layer)
        name = f"{block.name}{ON}{device.name}" if segment.device > 1 else block.name
        launch = traced(device, trace, name) if segment.device and trace is not OFF else None
        opened = open_segment(device, plan.config, block.layer, runs, vectors, own, launch)
        chooser = sparse or gated
        if chooser is not None and not segment.device:
            return chooser.adapted(opened, block.layer, segment.neurons_before)
        if link is None:
            return opened
        return link.adapted(opened) if segment.device else link.accompanied(opened, block.layer, block.name)

    places = residence.places
    if fetched is not None:
        always = _parts(places.long, sources.of(short=False), open_one)
        return (
            Weights(window, Arrangement(always, None, fetched.blocks(always, open_one)), steps=fetched),
            None,
            fetched,
            None,
        )
    if residence.records is not None:
        assert sparse is not None  # who reads by neurons predicts them
        streamed = _streamed(stack, plan, residence.records, sparse, window, trace, progress)
        tiles = _parts(places.long, sources.of(short=False), open_one)
        arrangement = Arrangement(tiles, None, streamed.blocks(plan.blocks, tiles, open_one))
        return Weights(window, arrangement, steps=streamed), None, None, sparse
    long = _arranged(places.long, sources.of(short=False), open_one, bool(sparse or gated))
    if sparse is not None:
        if window.kept is not None:
            sparse.measure(long)
        return Weights(window, long, steps=sparse), None, None, sparse
    short = long if places.short == places.long else _arranged(places.short, sources.of(short=True), open_one)
    crossover = residence.offload.crossover if residence.offload else 1
    return Weights(window, long, short, crossover, link), link, None, None


def _streamed(
    stack: ExitStack,
    plan: NodePlan,
    records: "RecordPlan",
    sparse: "SparseNode",
    window: Window,
    trace: NoTrace,
    progress: Progress,
) -> "StreamedNeurons":
    """Neurons that are read one by one, those that are active most often being there; `stack` closes them."""
    from worker.demand.records.node import StreamedNeurons

    if plan.options.verify_weights:
        for number in sorted(set(range(len(records.segments))) - window.placement.resident):
            with window.hold(number):  # compared with its hashes as it is read first
                pass
    streamed = stack.enter_context(closing(StreamedNeurons(records, sparse, window, trace)))
    if records.plain is None:
        streamed.fill(progress)
    return streamed


def traced(device: Device, trace: NoTrace, name: str) -> Launch:
    """Calls that an accelerator makes, each with a span on its own track from where it begins to where it ends."""

    def launch(call: Callable[[], Any]) -> Pending[Any]:
        def spanned() -> Any:
            with trace.span("accelerator", name):
                return call()

        return device.start(spanned)

    return launch


@dataclass(frozen=True)
class _Sources:
    window: Window
    kept: Sequence[Hold]
    link: "Accelerated | None"
    short: bool = False  # for short steps

    def of(self, short: bool) -> "_Sources":
        """Those of steps of that kind."""
        return replace(self, short=short)

    def hold(self, place: Place) -> Hold:
        if place.source == "window":
            return self.window.hold(place.number)
        if place.source == "kept":
            return self.kept[place.number]
        assert self.link is not None
        return self.link.hold(place.number, self.short)


def _arranged(
    visits: Visits, sources: _Sources, open_one: Callable[[NodeSegment], Segment], waits: bool = False
) -> Arrangement[Segment]:
    """`waits`: what is computed of a block is found out when its turn comes."""
    blocks = _parts(visits, sources, open_one)
    hosted = all(place.source == "window" for block in visits for place in block)
    return Arrangement(blocks, sources.window.kept if hosted and not waits else None)


def _parts(
    visits: Visits, sources: _Sources, open_one: Callable[[NodeSegment], Segment]
) -> list[list[tuple[Segment, Hold]]]:
    """The segments of every block, each with its hold."""
    return [[(open_one(place.segment), sources.hold(place)) for place in block] for block in visits]


def _window(
    plan: NodePlan,
    residence: Residence,
    held: Sequence[HeldBlock],
    reader: Device,
    trace: NoTrace,
    progress: Progress,
) -> Window:
    """What lies in the host's memory or comes from its disk, where `reader` copies from it at full speed."""
    extents, placement = residence.extents, residence.placement
    verify: Verify | None = Checksums(residence.segments, held) if plan.options.verify_weights else None
    if not placement.streamed_bytes:
        return Resident(extents, residence.disk, verify, progress, reader.staging)

    def make(placed: Placement, reads: ReadClock | None = None) -> MemoryWindow:
        return MemoryWindow(extents, placed, residence.disk, verify, trace, reads=reads, memory=reader.staging)

    if residence.records is not None and residence.records.plain is not None:
        return SwitchedWindow(make, placement, progress)
    window = make(placement)
    try:
        window.fill(progress)
    except BaseException:
        window.close()
        raise
    return window


def _load_kept(
    plan: NodePlan, residence: Residence, held: Sequence[HeldBlock], devices: Sequence[Device], placed: Placed
) -> list[Hold]:
    """Every segment that stays in the memory of its device."""
    kept = residence.places.kept
    verify = Checksums(kept, held) if plan.options.verify_weights else None
    loaded = [
        placed.load(
            devices[segment.device],
            segment.pieces(held),
            residence.disk,
            partial(verify, number) if verify is not None else None,
        )
        for number, segment in enumerate(kept)
    ]
    return [nullcontext(data) for data in loaded]


def _pages(
    plan: NodePlan, residence: Residence, devices: Sequence[Device], placed: Placed, link: "Accelerated | None"
) -> Callable[[int, int], HeldPages]:
    """Keys and values for a device (by its number) and a layer."""
    config, count = plan.config, residence.budget.pages
    if link is not None:
        return lambda device, layer: link.pages(layer) if device else link.home
    if not residence.places.kept:
        all_layers = KvPages.allocate(
            range(config.layers), count, plan.kv_heads, config.head_dim, plan.options.kv_dtype
        )
        return lambda device, layer: all_layers
    own = [
        placed.pages(device, plan, range(config.layers), count, _kv_heads(plan, residence, number))
        for number, device in enumerate(devices)
    ]
    return lambda device, layer: own[device]


def _kv_heads(plan: NodePlan, residence: Residence, device: int) -> int:
    """The most KV heads that a device computes of any block."""
    own = [run for segment in residence.places.kept if segment.device == device for run in segment.runs]
    widest = max((run for run in own if run.name == "kv"), key=lambda run: len(run.units))
    return len(widest.units.scaled(widest.layout.width // plan.config.kv_width, plan.config.kv_heads))
