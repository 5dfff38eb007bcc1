"""The host of an emulated node: its own arithmetic, in the time of another processor and another memory."""

from dataclasses import dataclass

import numpy as np

from tpi.devices.base import Event, Finished
from tpi.devices.emulated.lane import TimedLink
from tpi.devices.host import HostDevice, check_sizes
from tpi.devices.pages import Bytes


@dataclass(frozen=True)
class EmulatedHost(HostDevice):
    """See `tpi.devices.host.HostDevice`; its `kernels` are timed, and so is what it copies along `copies`."""

    copies: TimedLink | None = None

    def copy(self, source: Bytes, target: Bytes) -> Event:
        """See `Device.copy`."""
        check_sizes(source, target)
        if self.copies is None:
            return super().copy(source, target)
        copies = self.copies
        return Finished(lambda: copies.move(source.size, lambda: np.copyto(target, source)))
