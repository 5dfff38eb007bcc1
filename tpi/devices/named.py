"""Arrays that name memory which the host cannot reach: they say where it is, and never what is there."""

from typing import Any

import numpy as np

from tpi.devices.pages import Bytes


class NamedMemory(np.ndarray[Any, np.dtype[Any]]):
    """Memory of a device, and every slice, view and shape of it. Printing it reads nothing, as a failing test would."""

    def __repr__(self) -> str:
        """Where it is."""
        return f"<{self.dtype} {list(self.shape)} of a device, named by {self.ctypes.data:#x}>"

    __str__ = __repr__


def named(memory: Bytes) -> Bytes:
    """`memory` as the name of what lies elsewhere."""
    return memory.view(NamedMemory)
