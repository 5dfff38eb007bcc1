"""The sources of a node's segments: the host's memory window, resident memory of a device, an accelerator's ring."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from scheduler.model.placement import Placement
from scheduler.slots.stats import ReadClock
from scheduler.weights import Arrangement, Hold
from scheduler.window.load import Verify
from scheduler.window.switched import SwitchedWindow
from scheduler.window.window import MemoryWindow, Resident, Window
from tpi.devices.base import Device, Pending
from tpi.devices.pages import Bytes
from tpi.kernels.kv import KvPages
from tpi.progress import Progress
from tpi.trace import NoTrace
from worker.node.allocations import DeviceAllocations
from worker.node.segment import HeldPages, Launch, Segment
from worker.node_plan import NodePlan
from worker.plan.checksums import Checksums
from worker.plan.places import Visits
from worker.plan.residence import Residence
from worker.plan.segments import NodeSegment
from worker.shards.image import HeldBlock

if TYPE_CHECKING:
    from worker.accelerator.accelerated import Accelerators


def traced(device: Device, trace: NoTrace, name: str) -> Launch:
    """Return a function that starts calls on an accelerator and records each call as a span called `name`."""

    def launch(call: Callable[[], Any]) -> Pending[Any]:
        def spanned() -> Any:
            with trace.span("accelerator", name):
                return call()

        return device.start(spanned)

    return launch


@dataclass(frozen=True)
class Sources:
    """All sources of segments of a node, for short or for long steps."""

    window: Window  # the memory window of the host
    kept: Sequence[Hold]  # holds of the segments that are resident in the memory of their devices
    link: "Accelerators | None"  # the accelerators, which hold streamed segments in their rings
    short: bool = False  # True: for short steps

    def of(self, short: bool) -> "Sources":
        """Return the sources for short steps if `short` is True, else those for long steps."""
        return replace(self, short=short)

    def hold(self, segment: NodeSegment) -> Hold:
        """Return a context manager that yields the bytes of `segment`."""
        if segment.memory == "window":
            return self.window.hold(segment.number)
        if segment.memory == "kept":
            return self.kept[segment.number]
        assert self.link is not None
        return self.link.hold(segment.number, self.short)


def arrange(
    visits: Visits, sources: Sources, open_one: Callable[[NodeSegment], Segment], waits: bool = False
) -> Arrangement[Segment]:
    """Return the segments of every block, each with the context manager that yields its bytes.

    `waits` is True if the units to compute are chosen during the step. Only if it is False, and one device holds all
    weights in memory, the blocks can run as a chain.
    """
    blocks = parts(visits, sources, open_one)
    return Arrangement(blocks, None if waits else _on_one_device(visits, sources))


def _on_one_device(visits: Visits, sources: Sources) -> Sequence[Bytes] | None:
    """Return the bytes of all segments, in order of use, if one device holds them and keys and values; else None."""
    segments = [segment for block in visits for segment in block]
    if all(segment.memory == "window" for segment in segments):
        return sources.window.kept
    alike = {(segment.memory, segment.device) for segment in segments}
    if len(alike) > 1 or segments[0].memory != "kept" or sources.link is None or not sources.link.chains:
        return None
    kept = []
    for segment in segments:
        with sources.kept[segment.number] as data:
            kept.append(data)
    return kept


def parts(
    visits: Visits, sources: Sources, open_one: Callable[[NodeSegment], Segment]
) -> list[list[tuple[Segment, Hold]]]:
    """Return the segments of every block, each with the context manager that yields its bytes.

    Args:
        visits: the segments to compute, by block in order of use.
        sources: provide the bytes.
        open_one: turns a segment of the plan into one that a device computes.
    """
    return [[_opened(segment, sources, open_one) for segment in block] for block in visits]


def _opened(segment: NodeSegment, sources: Sources, open_one: Callable[[NodeSegment], Segment]) -> tuple[Segment, Hold]:
    opened = open_one(segment)
    if not segment.parts:
        return opened, sources.hold(segment)
    assert sources.link is not None
    return sources.link.gather(opened, [(part, sources.hold(part)) for part in segment.parts])


def open_window(
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


def load_kept(
    plan: NodePlan,
    residence: Residence,
    held: Sequence[HeldBlock],
    devices: Sequence[Device],
    allocations: DeviceAllocations,
) -> list[Hold]:
    """Load the segments that are resident in the memory of their devices, and return a hold of each."""
    kept = residence.places.kept
    verify = Checksums(kept, held) if plan.options.verify_weights else None
    loaded = [
        allocations.load(
            devices[segment.device],
            segment.pieces(held),
            residence.disk,
            partial(verify, number) if verify is not None else None,
        )
        for number, segment in enumerate(kept)
    ]
    return [nullcontext(data) for data in loaded]


def open_pages(plan: NodePlan, count: int, link: "Accelerators | None") -> Callable[[int, int], HeldPages]:
    """Return a function that takes the number of a device and that of a layer, and returns the layer's KV pages there.

    With accelerators (`link`), return the pages that these have allocated. Otherwise allocate `count` pages in the
    host's memory.
    """
    if link is not None:
        return lambda device, layer: link.pages(layer) if device else link.host_pages
    heads = {layer: (each.kv_heads, each.head_dim) for layer, each in plan.layer_heads.items()}
    pages = KvPages.of_layers(heads, count, plan.options.kv_dtype)
    return lambda device, layer: pages
