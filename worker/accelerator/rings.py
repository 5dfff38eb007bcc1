"""Rings in accelerators' memory for streamed pieces. The rings of long and of short steps use the same memory in turn.

Each accelerator has its own ring, which loads ahead as far as its memory allows. But if the host's window streams from
disk, it has a single reader, which takes segments in the order of use. Then all accelerators have one ring together.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial

from scheduler.transfer.queue import TransferQueue
from scheduler.transfer.ring import DeviceRing, RingPart, RingSegment
from scheduler.window.window import Window
from tpi.devices.base import Device
from tpi.devices.pages import Bytes
from tpi.trace import ON, NoTrace
from worker.node.allocations import DeviceAllocations
from worker.plan.offload import Numbers, OffloadPlan
from worker.plan.places import StreamedRange


class Rings:
    """The rings of one node. Long and short steps use the same rings if they stream the same pieces."""

    def __init__(
        self,
        devices: Sequence[Device],
        plan: OffloadPlan,
        fed: Mapping[int, StreamedRange],
        window: Window,
        allocations: DeviceAllocations,
        queue: TransferQueue,
        trace: NoTrace,
        chunk: int | None = None,
    ) -> None:
        """Allocate the rings and start to load pieces of long steps.

        Args:
            devices: the accelerators.
            plan: which pieces are streamed in long and in short steps.
            fed: the place in `window` of each streamed piece.
            window: the window of the host, from which pieces are loaded.
            allocations: allocates memory on devices.
            queue: makes the transfers.
            trace: recorder of stalls.
            chunk: the most bytes of one copy, so that other transfers can go between two copies; None: no limit.

        Raises:
            DeviceFullError: if a device does not have enough memory for the larger of its rings.
        """
        self._devices, self._window, self.chunk = devices, window, chunk
        contents = {piece: self._contents(plan, piece, part) for piece, part in fed.items()}
        cards = zip(plan.cards, devices, strict=False)  # the last ones may have no pieces
        parts = [
            RingPart(device, allocations.allocate(device, plan.ring_bytes(card), plan.ring_cuts(card)))
            for card, device in cards
        ]
        together = any(each.in_turn for each in contents.values())
        groups = [frozenset(fed)] if together else [plan.pieces_on(card) for card in plan.cards]
        self._group = {piece: number for number, group in enumerate(groups) for piece in group}

        def opened(pieces: Numbers) -> list[DeviceRing]:
            return [DeviceRing(parts, plan.ring(pieces & group), contents, queue, trace) for group in groups]

        self._long = opened(plan.long)
        self._short = self._long if plan.short == plan.long else opened(plan.short)
        self._now = self._long
        for ring in self._now:
            ring.resume()

    @property
    def loaded_bytes(self) -> int:
        """Bytes that were loaded into the accelerators' rings since the start."""
        return sum(ring.loaded_bytes for ring in self._all)

    @property
    def stall_seconds(self) -> float:
        """Seconds that holds waited for loads since the start."""
        return sum(ring.stall_seconds for ring in self._all)

    def hold(self, piece: int, short: bool) -> AbstractContextManager[Bytes]:
        """Return a context manager that yields the bytes of `piece` on its accelerator.

        `short` is True in short steps, since long steps may use another ring.

        Raises:
            WeightsError: if the piece could not be loaded; names the file.
            TpiError: if held pieces leave no slot free, or the queue is closed.
        """
        return (self._short if short else self._long)[self._group[piece]].hold(piece)

    def switch_to(self, short: bool) -> None:
        """Use the rings of short steps if `short` is True, else those of long steps, from now on.

        Discard the pieces that the other rings have loaded ahead.
        """
        rings = self._short if short else self._long
        if rings is not self._now:
            for before in self._now:
                before.pause()
            self._now = rings
            for ring in rings:
                ring.resume()

    def wait_idle(self) -> None:
        """Wait until no load is in flight. Pieces that were loaded remain."""
        for ring in self._now:
            ring.wait_idle()

    def abandon(self) -> None:
        """Abort the step. A piece that failed to load is loaded again when it is needed next."""
        for ring in self._now:
            ring.abandon()

    @property
    def _all(self) -> set[DeviceRing]:
        return {*self._long, *self._short}

    def _contents(self, plan: OffloadPlan, piece: int, part: StreamedRange) -> RingSegment:
        segment = plan.pieces[piece]
        card, streamed = segment.device - 1, part.number not in self._window.placement.resident
        name = f"{plan.piece_name(piece)}{ON}{self._devices[card].name}" if card else plan.piece_name(piece)
        feed = partial(self._feed, part, self._devices[card], plan.problem.machine.cards[card].link.piece)
        return RingSegment(name, part.nbytes, feed, card, streamed)

    def _feed(self, part: StreamedRange, device: Device, piece: int, slot: Bytes) -> None:
        """Copy the weights `part` of the window to their `slot` on `device`.

        If the disk is still reading them, make a copy whenever about `piece` further bytes have arrived. With copies of
        that size, the link is almost as fast as it can be. If the weights are in host memory, make a single copy,
        because nothing else could use the link between two copies.
        """
        at = 0
        for data in self._window.follow(part.number, piece):
            begin, end = max(at, part.begin), min(at + data.size, part.begin + part.nbytes)
            if begin < end:
                self._copy(device, data[begin - at : end - at], slot[begin - part.begin : end - part.begin])
            at += data.size

    def _copy(self, device: Device, source: Bytes, target: Bytes) -> None:
        """Copy bytes to the accelerator in chunks, and wait for each chunk."""
        chunk = self.chunk or max(1, source.size)  # read once: another thread may replace it during the copy
        for begin in range(0, source.size, chunk):
            end = begin + chunk
            device.copy(source[begin:end], target[begin:end]).wait()
