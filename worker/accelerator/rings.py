"""What passes through accelerators' memory in long steps, and in short ones: two rings in one place, by turns.

Several accelerators have rings of their own, each of which runs ahead as far as it goes. But where the window below
streams from disk, it has one reader, who takes segments in the order of use: then they have one ring together.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial

from scheduler.transfer.queue import TransferQueue
from scheduler.transfer.ring import DeviceRing, RingContents, RingPart
from scheduler.window.window import Window
from tpi.devices.base import Device
from tpi.devices.pages import Bytes
from tpi.trace import ON, NoTrace
from worker.node.placed import Placed
from worker.plan.offload import Numbers, OffloadPlan
from worker.plan.places import Fed


class Rings:
    """The rings of one node. Where long and short steps take the same up, they are one."""

    def __init__(
        self,
        devices: Sequence[Device],
        plan: OffloadPlan,
        fed: Mapping[int, Fed],
        window: Window,
        placed: Placed,
        queue: TransferQueue,
        trace: NoTrace,
    ) -> None:
        """`devices` are the accelerators; `fed` says, for each piece that is taken up, where `window` has it.

        Raises:
            DeviceFullError: if a device has no room for its part of the larger one.
        """
        self._devices, self._window = devices, window
        contents = {piece: self._contents(plan, piece, part) for piece, part in fed.items()}
        cards = zip(plan.cards, devices, strict=False)  # to the last ones nothing may be dealt
        parts = [
            RingPart(device, placed.allocate(device, plan.ring_bytes(card), plan.ring_cuts(card)))
            for card, device in cards
        ]
        together = any(each.in_turn for each in contents.values())
        groups = [frozenset(fed)] if together else [plan.on(card) for card in plan.cards]
        self._group = {piece: number for number, group in enumerate(groups) for piece in group}

        def opened(there: Numbers) -> list[DeviceRing]:
            return [DeviceRing(parts, plan.ring(there & group), contents, queue, trace) for group in groups]

        self._long = opened(plan.long)
        self._short = self._long if plan.short == plan.long else opened(plan.short)
        self._now = self._long
        for ring in self._now:
            ring.resume()

    @property
    def loaded_bytes(self) -> int:
        """Bytes that were taken up since the start."""
        return sum(ring.loaded_bytes for ring in self._all)

    @property
    def stall_seconds(self) -> float:
        """Seconds that holds waited since the start."""
        return sum(ring.stall_seconds for ring in self._all)

    def hold(self, piece: int, short: bool) -> AbstractContextManager[Bytes]:
        """The hold of a piece in steps of that kind. Errors as `scheduler.transfer.ring.DeviceRing.hold`."""
        return (self._short if short else self._long)[self._group[piece]].hold(piece)

    def turn_to(self, short: bool) -> None:
        """Steps of the other kind follow: what was loaded ahead for those before is given up."""
        rings = self._short if short else self._long
        if rings is not self._now:
            for before in self._now:
                before.pause()
            self._now = rings
            for ring in rings:
                ring.resume()

    def quiet(self) -> None:
        """See `scheduler.transfer.ring.DeviceRing.quiet`."""
        for ring in self._now:
            ring.quiet()

    def abandon(self) -> None:
        """See `scheduler.transfer.ring.DeviceRing.abandon`."""
        for ring in self._now:
            ring.abandon()

    @property
    def _all(self) -> set[DeviceRing]:
        return {*self._long, *self._short}

    def _contents(self, plan: OffloadPlan, piece: int, part: Fed) -> RingContents:
        segment = plan.pieces[piece]
        card, streamed = segment.device - 1, part.number not in self._window.placement.resident
        name = f"{plan.named(piece)}{ON}{self._devices[card].name}" if card else plan.named(piece)
        feed = partial(self._feed, part, self._devices[card], plan.problem.machine.cards[card].link.piece)
        return RingContents(name, part.nbytes, feed, card, streamed)

    def _feed(self, part: Fed, device: Device, piece: int, slot: Bytes) -> None:
        """Copy a segment as it arrives: what is read from disk is on its way over the link while more is read.

        It goes in pieces that are large enough for the link, as was measured; what is in memory goes at once, since
        nothing else could use the link between two pieces.
        """
        at = 0
        for data in self._window.follow(part.number, piece):
            begin, end = max(at, part.begin), min(at + data.size, part.begin + part.nbytes)
            if begin < end:
                self._copy(device, data[begin - at : end - at], slot[begin - part.begin : end - part.begin])
            at += data.size

    def _copy(self, device: Device, source: Bytes, target: Bytes) -> None:
        """Until all of it is there."""
        device.copy(source, target).wait()
