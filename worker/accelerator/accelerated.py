"""The accelerators of a node at run time: the rings for streamed weights, and the KV pages that are copied there."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import dataclass
from typing import Any

from scheduler.transfer.pages import PageBuffer, StagedPages
from scheduler.transfer.queue import TransferQueue
from scheduler.weights import Hold
from scheduler.window.window import Window
from tpi.devices.base import Device
from tpi.devices.pages import Bytes
from tpi.kernels.kv import KvPages
from tpi.trace import NoTrace
from worker.accelerator.rings import Rings
from worker.node.allocations import DeviceAllocations
from worker.node.division import Division
from worker.node.segment import HeldPages, Segment
from worker.node_plan import NodePlan
from worker.plan.offload import OffloadPlan
from worker.plan.places import Places
from worker.plan.residence import Residence
from worker.plan.segments import NodeSegment

_MB = 1e6


@dataclass(frozen=True)
class LinkFigures:
    """The bytes copied between the host and its accelerators since the start, and the seconds that holds waited for
    copies.
    """

    weight_bytes: int = 0
    kv_bytes: int = 0
    stall_seconds: float = 0.0  # time for which computing waited for weights


class Accelerators:
    """The accelerators of one node. Close the host's window before this object, as transfers read from the window."""

    _chunk: int | None = None  # the most bytes of one copy into a ring

    def __init__(
        self,
        devices: Sequence[Device],
        plan: NodePlan,
        residence: Residence,
        allocations: DeviceAllocations,
        trace: NoTrace,
    ) -> None:
        """Allocate the memory for KV pages. The rings are allocated later, by `open_rings`.

        Args:
            devices: the host, then the node's accelerators.
            plan: the node's part of the deployment.
            residence: where its weights lie; it must have an offload plan.
            allocations: allocates memory on devices.
            trace: recorder of transfers.

        Raises:
            DeviceFullError: if a device does not have enough memory.
        """
        assert residence.offload is not None
        self._host, *self.devices = devices
        self._plan, self._trace = plan, trace
        self.offload: OffloadPlan = residence.offload
        self._places: Places = residence.places
        self._remark = residence.remark
        self._details: Any = residence.details  # of the mode
        self._allocations = allocations
        self._queue = TransferQueue(trace, len(self.devices))
        self._rings: Rings | None = None
        self._short = False  # whether the last step was short
        with ExitStack() as stack:
            stack.enter_context(closing(self))
            self.host_pages = self._home(residence.budget.pages)
            self._staged: list[StagedPages] = []
            self._pages = self._opened(residence.budget.pages)
            stack.pop_all()

    @property
    def device(self) -> Device:
        """The accelerator, or the first of several."""
        return self.devices[0]

    @property
    def figures(self) -> LinkFigures:
        """The bytes copied to the accelerators since the start, and the seconds that holds waited for copies."""
        rings, kv = self._rings, sum(staged.moved_bytes for staged in self._staged)
        return LinkFigures(rings.loaded_bytes, kv, rings.stall_seconds) if rings else LinkFigures(0, kv)

    def describe(self) -> str:
        """Return a sentence, without a full stop, about the plan and the traffic over the links."""
        plan, moved = self.offload, self.figures
        cards = "accelerators" if len(plan.cards) > 1 else "accelerator"
        said = [
            self.resident_summary,
            f"keys and values are {f'on the {cards}' if plan.kv == 'gpu' else 'in memory'}",
            _steps(plan),
            f"{moved.weight_bytes / _MB:.0f} MB of weights and {moved.kv_bytes / _MB:.0f} MB of keys and values moved",
            self._remark,
        ]
        return "; ".join(part for part in said if part)

    @property
    def resident_summary(self) -> str:
        """A phrase for the user that says how many pieces of the weights are resident on each accelerator."""
        plan = self.offload
        each = [
            f"{device.name} holds {len(plan.resident & plan.pieces_on(number))}"
            for number, device in enumerate(self.devices, 1)
        ]
        head = " and the head" if plan.head_bytes else ""
        return f"{', '.join(each)} of {len(plan.pieces)} pieces of the weights{head}"

    @property
    def chains(self) -> bool:
        """True if blocks that are all resident on an accelerator are computed as a chain: one call of its kernels."""
        return self.offload.kv == "gpu" and not self.offload.chunked and self.offload.problem.in_chains

    @property
    def division(self) -> Division | None:
        """The division of steps into micro-batches; None for the default, `worker.node.division.Halves`."""
        return None

    def adapt_segment(self, segment: Segment) -> Segment:
        """Return the segment to use instead of the accelerator's `segment`; by default `segment` itself."""
        return segment

    def gather(self, segment: Segment, parts: Sequence[tuple[NodeSegment, Hold]]) -> tuple[Segment, Hold]:
        """Combine `parts`, which lie in several places, into one segment of an accelerator with one hold.

        Only plans for which `OffloadPlan.chunked` is True have such segments.

        Raises:
            TypeError: if this class does not support it.
        """
        raise TypeError(f"{type(self).__name__} needs {segment} in one place, but it lies in {len(parts)} places")

    def adapt_host_segment(self, segment: Segment, layer: int, name: str) -> Segment:
        """Return the segment to use instead of the host's `segment` under this plan; by default `segment` itself.

        Args:
            segment: a segment that the host computes.
            layer: the number of its layer.
            name: the name of its block.
        """
        return segment

    def pages(self, layer: int) -> HeldPages:
        """Return the KV pages for attention of `layer`: on its accelerator, or in host memory if the host attends."""
        return self._pages.get(layer, self.host_pages)

    def begin(self, short: bool) -> None:
        """Begin a step, which is short or long.

        If short and long steps stream different pieces, and the last step was not of the same kind, wait for its
        transfers and change to the other rings.
        """
        for staged in self._staged:
            staged.begin()
        if short != self._short and self.offload.long != self.offload.short:
            self.wait_idle()
            if self._rings is not None:
                self._rings.switch_to(short)
        self._short = short

    def abandon(self) -> None:
        """Abort the step: discard its transfers, failed ones included."""
        if self._rings is not None:
            self._rings.abandon()
        for staged in self._staged:
            staged.abandon()

    def wait_idle(self) -> None:
        """Wait for all transfers in flight, so that other code may hold segments of the host's window."""
        if self._rings is not None:
            self._rings.wait_idle()
        for staged in self._staged:
            staged.flush()

    def open_rings(self, window: Window) -> None:
        """Open the accelerators' rings and start to load streamed pieces from the host's `window`."""
        plan, fed = self.offload, dict(zip(self.offload.streamed_pieces, self._places.fed, strict=True))
        if fed:
            self._rings = Rings(
                self.devices, plan, fed, window, self._allocations, self._queue, self._trace, self._chunk
            )

    def hold(self, piece: int, short: bool) -> AbstractContextManager[Bytes]:
        """Return a context manager that yields the bytes of a streamed piece on its accelerator.

        `short` is True in short steps, since long steps may use another ring.

        Raises:
            WeightsError: if the piece could not be loaded; names the file.
        """
        assert self._rings is not None
        return self._rings.hold(piece, short)

    def close(self) -> None:
        """Stop all transfers and join their threads. Further calls do nothing."""
        self._queue.close()

    def _home(self, pages: int) -> KvPages:
        config, offload, dtype = self._plan.config, self.offload, self._plan.options.kv_dtype
        heads = self._heads if offload.host_kv_heads is None else offload.host_kv_heads
        return KvPages.allocate(offload.host_kv_layers, pages, heads, config.head_dim, dtype, self.device.staging)

    def _opened(self, count: int) -> Mapping[int, HeldPages]:
        """Allocate `count` KV pages for each layer with attention on an accelerator: resident pages, or buffers for
        visits.
        """
        found: dict[int, HeldPages] = {}
        for card, device in zip(self.offload.cards, self.devices, strict=False):  # the last ones may have no pieces
            if self.offload.kv == "gpu":
                layers = self.offload.layers_on(card)
                found |= dict.fromkeys(layers, self._allocations.pages(device, self._plan, layers, count, self._heads))
            elif layers := self.offload.visiting_layers_on(card):
                self._staged.append(self._stages(card, device, count))
                found |= dict.fromkeys(layers, self._staged[-1])
        return found

    def _stages(self, card: int, device: Device, count: int) -> StagedPages:
        numbers = range(self.offload.visiting_at_once(card))
        room = self._allocations.pages(device, self._plan, numbers, count, self._heads)
        stages = [PageBuffer(room.keys[number], room.values[number]) for number in numbers]
        return StagedPages(
            device, self.host_pages, stages, self.offload.visiting_layers_on(card), self._queue, card - 1
        )

    @property
    def _heads(self) -> int:
        return self._plan.kv_heads


def _steps(plan: OffloadPlan) -> str:
    """Return a phrase for the user about the steps that stream the pieces outside accelerators.

    The result is empty if there are none.
    """
    if not plan.host_pieces:
        return ""
    target = "them" if len(plan.cards) > 1 else "it"
    if plan.long == plan.short:
        return f"the others are streamed to {target}" if plan.long else "the host computes the others"
    return (
        f"steps of {plan.crossover} or more tokens stream the others to {target}, shorter ones compute them on the host"
    )
