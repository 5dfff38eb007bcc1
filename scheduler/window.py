"""What the block loop knows of weight memory: `with window.hold(block) as data:`.

    from scheduler.window import Extent, MemoryWindow, Resident, Window

`Resident` keeps every block (the scheduler is off). `MemoryWindow` keeps what a budget allows and streams the rest.
"Scheduler" here means the scheduler of weight memory; admission of requests is `master.batcher`.
"""

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from scheduler.extent import Extent
from scheduler.memory import Bytes, page_buffer
from tpi.errors import WeightsError

__all__ = ["Extent", "Resident", "Window"]


class Window(Protocol):
    """The weights of one node's blocks, block by block, in a cycle."""

    def hold(self, block: int) -> AbstractContextManager[Bytes]:
        """The bytes of `block`: 1-D uint8, page-aligned, read-only by contract, valid inside the `with` only.

        Raises:
            WeightsError: if the block could not be loaded; names the file.
        """
        ...

    def close(self) -> None:
        """Stop loading and join every thread. Idempotent."""
        ...


class Resident:
    """Every block in memory, loaded once: the scheduler switched off."""

    def __init__(self, extents: Sequence[Extent]) -> None:
        self._held = [nullcontext(_read(extent)) for extent in extents]

    def hold(self, block: int) -> AbstractContextManager[Bytes]:
        """See `Window.hold`."""
        return self._held[block]

    def close(self) -> None:
        """Nothing runs in the background."""


def _read(extent: Extent) -> Bytes:
    slot = page_buffer(extent.slot_bytes)
    view = extent.view(slot)
    done = 0
    try:
        with open(extent.path, "rb", buffering=0) as file:
            while done < extent.nbytes:
                got = os.preadv(file.fileno(), [view[done:]], extent.offset + done)
                if not got:
                    raise WeightsError(f"{extent.path} ends early; remove it, and it is fetched again")
                done += got
    except OSError as error:
        raise WeightsError(f"{extent.path} could not be read: {error.strerror}") from error
    return view
