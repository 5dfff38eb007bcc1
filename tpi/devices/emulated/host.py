"""The host of an emulated node: the real host's results, in the time of the emulated processor and memory."""

from dataclasses import dataclass

import numpy as np

from tpi.devices.base import Event, Finished
from tpi.devices.emulated.lane import TimedLink
from tpi.devices.host import HostDevice, check_sizes
from tpi.devices.pages import Bytes


@dataclass(frozen=True)
class EmulatedHost(HostDevice):
    """A host in emulated time: its `kernels` are timed, and its copies take as long as on the link `copies`."""

    copies: TimedLink | None = None

    def copy(self, source: Bytes, target: Bytes) -> Event:
        """Copy in the calling thread, in the emulated time of the link `copies`; return an event that has ended."""
        check_sizes(source, target)
        if self.copies is None:
            return super().copy(source, target)
        copies = self.copies
        return Finished(lambda: copies.move(source.size, lambda: np.copyto(target, source)))
