"""A node's accelerators at work: what stays there, what passes through, and the keys and values that visit them."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import dataclass

from scheduler.transfer.pages import PageStage, StagedPages
from scheduler.transfer.queue import TransferQueue
from scheduler.weights import Hold
from scheduler.window.window import Window
from tpi.devices.base import Device
from tpi.devices.pages import Bytes
from tpi.kv import KvPages
from tpi.trace import NoTrace
from worker.accelerator.rings import Rings
from worker.node.division import Division
from worker.node.placed import Placed
from worker.node.segment import HeldPages, Segment
from worker.plan.node_plan import NodePlan
from worker.plan.offload import OffloadPlan
from worker.plan.places import Places
from worker.plan.residence import Residence
from worker.plan.segments import NodeSegment

_MB = 1e6


@dataclass(frozen=True)
class LinkFigures:
    """What went over the links since the start: bytes, and seconds that computing waited for weights."""

    weight_bytes: int = 0
    kv_bytes: int = 0
    stall_seconds: float = 0.0


class Accelerated:
    """The accelerators of one node. A context manager: close the window first, which transfers read from."""

    def __init__(
        self, devices: Sequence[Device], plan: NodePlan, residence: Residence, placed: Placed, trace: NoTrace
    ) -> None:
        """Takes their memory.

        Raises:
            DeviceFullError: if a device has no room for what `residence` puts there.
        """
        assert residence.offload is not None
        self.devices, self._plan, self._trace = devices, plan, trace
        self._offload: OffloadPlan = residence.offload
        self._places: Places = residence.places
        self._placed = placed
        self._queue = TransferQueue(trace, len(devices))
        self._rings: Rings | None = None
        self._short = False  # the last step
        with ExitStack() as stack:
            stack.enter_context(closing(self))
            self.home = self._home(residence.budget.pages)
            self._staged: list[StagedPages] = []
            self._pages = self._opened(residence.budget.pages)
            stack.pop_all()

    @property
    def device(self) -> Device:
        """The accelerator, or the first of several."""
        return self.devices[0]

    @property
    def figures(self) -> LinkFigures:
        """What went over the link so far."""
        rings, kv = self._rings, sum(staged.moved_bytes for staged in self._staged)
        return LinkFigures(rings.loaded_bytes, kv, rings.stall_seconds) if rings else LinkFigures(0, kv)

    def describe(self) -> str:
        """What they do, and what went over their links, in a sentence without a full stop."""
        plan, moved = self._offload, self.figures
        said = [
            self.held,
            f"keys and values are {'there' if plan.kv == 'gpu' else 'in memory'}",
            _steps(plan),
            f"{moved.weight_bytes / _MB:.0f} MB of weights and {moved.kv_bytes / _MB:.0f} MB of keys and values moved",
            plan.remark,
        ]
        return "; ".join(part for part in said if part)

    @property
    def held(self) -> str:
        """What of the weights stays on the accelerators, in words."""
        plan = self._offload
        each = [
            f"{device.name} holds {len(plan.kept & plan.on(number))}" for number, device in enumerate(self.devices, 1)
        ]
        return f"{', '.join(each)} of {len(plan.pieces)} pieces of the weights"

    @property
    def division(self) -> Division | None:
        """What steps are divided into, if not in halves."""
        return None

    def adapted(self, segment: Segment) -> Segment:
        """A segment of the accelerator as it is computed."""
        return segment

    def gathered(self, segment: Segment, parts: Sequence[tuple[NodeSegment, Hold]]) -> tuple[Segment, Hold]:
        """A segment of the accelerator whose bytes lie in several places, and its hold: for plans that gather alone.

        Raises:
            TypeError: here, whose plans do not (see `OffloadPlan.gathers`).
        """
        raise TypeError(f"{type(self).__name__} computes {segment} from one place, and has {len(parts)}")

    def accompanied(self, segment: Segment, layer: int, name: str) -> Segment:
        """A segment of the host's, of the block `name` of a layer, as it is computed."""
        return segment

    def pages(self, layer: int) -> HeldPages:
        """Where attention of `layer` finds its keys and values on its accelerator; at home, if the host attends."""
        return self._pages.get(layer, self.home)

    def begin(self, short: bool) -> None:
        """A step begins; where short ones are computed elsewhere than long ones, what the last one left is awaited."""
        for staged in self._staged:
            staged.begin()
        if short != self._short and self._offload.long != self._offload.short:
            self.settle()
            if self._rings is not None:
                self._rings.turn_to(short)
        self._short = short

    def abandon(self) -> None:
        """The step breaks off: what it moved, or failed to, means nothing to the next one."""
        if self._rings is not None:
            self._rings.abandon()
        for staged in self._staged:
            staged.abandon()

    def settle(self) -> None:
        """Wait for all transfers: what the host holds is not read for the accelerator meanwhile."""
        if self._rings is not None:
            self._rings.quiet()
        for staged in self._staged:
            staged.settle()

    def open_rings(self, window: Window) -> None:
        """Begin to load what passes through the accelerators, from the host's `window`."""
        plan, fed = self._offload, dict(zip(self._offload.lifted, self._places.fed, strict=True))
        if fed:
            self._rings = Rings(self.devices, plan, fed, window, self._placed, self._queue, self._trace)

    def hold(self, piece: int, short: bool) -> AbstractContextManager[Bytes]:
        """The hold of a piece that passes through, in long or in short steps."""
        assert self._rings is not None
        return self._rings.hold(piece, short)

    def close(self) -> None:
        """Make no more transfers, and join what makes them. Idempotent."""
        self._queue.close()

    def _home(self, pages: int) -> KvPages:
        config, offload, dtype = self._plan.config, self._offload, self._plan.options.kv_dtype
        heads = self._heads if offload.home_heads is None else offload.home_heads
        return KvPages.allocate(offload.home, pages, heads, config.head_dim, dtype, self.device.staging)

    def _opened(self, count: int) -> Mapping[int, HeldPages]:
        """So many pages of every layer that attends on an accelerator: they live there, or visit it."""
        found: dict[int, HeldPages] = {}
        for card, device in zip(self._offload.cards, self.devices, strict=False):  # the last ones may have nothing
            if self._offload.kv == "gpu":
                layers = self._offload.layers_on(card)
                found |= dict.fromkeys(layers, self._placed.pages(device, self._plan, layers, count, self._heads))
            elif layers := self._offload.staged_on(card):
                self._staged.append(self._stages(card, device, count))
                found |= dict.fromkeys(layers, self._staged[-1])
        return found

    def _stages(self, card: int, device: Device, count: int) -> StagedPages:
        numbers = range(self._offload.stages(card))
        room = self._placed.pages(device, self._plan, numbers, count, self._heads)
        stages = [PageStage(room.keys[number], room.values[number]) for number in numbers]
        return StagedPages(device, self.home, stages, self._offload.staged_on(card), self._queue, card - 1)

    @property
    def _heads(self) -> int:
        return self._plan.kv_heads


def _steps(plan: OffloadPlan) -> str:
    """Which steps compute there what does not stay there."""
    if not plan.fed:
        return ""
    if plan.long == plan.short:
        return (
            f"the others pass through {'them' if len(plan.cards) > 1 else 'it'}"
            if plan.long
            else "the host computes the others"
        )
    return f"steps of {plan.crossover} tokens and more take the others there, shorter ones compute them here"
