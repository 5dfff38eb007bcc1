"""What passes through an accelerator's memory in long steps, and in short ones: two rings in one place, by turns."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from functools import partial

from scheduler.transfer.queue import TransferQueue
from scheduler.transfer.ring import DeviceRing, RingContents
from scheduler.window.window import Window
from tpi.devices.base import Device
from tpi.devices.pages import Bytes
from tpi.trace import NoTrace
from worker.node.placed import Placed
from worker.plan.offload import OffloadPlan
from worker.plan.places import Fed


class Rings:
    """The rings of one node. Where long and short steps take the same up, they are one."""

    def __init__(
        self,
        device: Device,
        plan: OffloadPlan,
        fed: Mapping[int, Fed],
        window: Window,
        placed: Placed,
        queue: TransferQueue,
        trace: NoTrace,
    ) -> None:
        """`fed` says, for each piece that is taken up, where the host's `window` has it.

        Raises:
            DeviceFullError: if the device has no room for the larger one.
        """
        self._device, self._window = device, window
        contents = {
            piece: RingContents(plan.pieces[piece].block.name, part.nbytes, partial(self._feed, part))
            for piece, part in fed.items()
        }
        memory = placed.allocate(device, plan.ring_bytes)
        long, short = (plan.ring(there) for there in (plan.long, plan.short))
        self._long = DeviceRing(device, long, memory, contents, queue, trace)
        self._short = (
            self._long if plan.short == plan.long else DeviceRing(device, short, memory, contents, queue, trace)
        )
        self._now = self._long
        self._now.resume()

    @property
    def loaded_bytes(self) -> int:
        """Bytes that were taken up since the start."""
        return sum(ring.loaded_bytes for ring in {self._long, self._short})

    @property
    def stall_seconds(self) -> float:
        """Seconds that holds waited since the start."""
        return sum(ring.stall_seconds for ring in {self._long, self._short})

    def hold(self, piece: int, short: bool) -> AbstractContextManager[Bytes]:
        """The hold of a piece in steps of that kind. Errors as `scheduler.transfer.ring.DeviceRing.hold`."""
        return (self._short if short else self._long).hold(piece)

    def turn_to(self, short: bool) -> None:
        """Steps of the other kind follow: what was loaded ahead for those before is given up."""
        ring = self._short if short else self._long
        if ring is not self._now:
            self._now.pause()
            self._now = ring
            ring.resume()

    def quiet(self) -> None:
        """See `scheduler.transfer.ring.DeviceRing.quiet`."""
        self._now.quiet()

    def abandon(self) -> None:
        """See `scheduler.transfer.ring.DeviceRing.abandon`."""
        self._now.abandon()

    def _feed(self, part: Fed, slot: Bytes) -> None:
        """Copy a segment as it arrives: what is read from disk is on its way over the link while more is read."""
        at = 0
        for data in self._window.follow(part.number):
            begin, end = max(at, part.begin), min(at + data.size, part.begin + part.nbytes)
            if begin < end:
                self._copy(data[begin - at : end - at], slot[begin - part.begin : end - part.begin])
            at += data.size

    def _copy(self, source: Bytes, target: Bytes) -> None:
        """Until all of it is there."""
        self._device.copy(source, target).wait()
