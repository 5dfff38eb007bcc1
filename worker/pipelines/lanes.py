"""What runs beside a node's accelerator for a batch: the host's attention, and heads that cross between the two."""

from collections.abc import Callable
from typing import Any, Protocol, TypeVar, cast

from tpi.devices.base import Device, Event, Finished, Pending
from tpi.devices.inorder import InOrder
from tpi.trace import OFF, NoTrace

T = TypeVar("T")
Given = TypeVar("Given")


class AttentionThread(Protocol):
    """A thread that makes calls one after the other."""

    def start(self, call: Callable[[], T]) -> Pending[T]:
        """Have `call` made after those before it."""
        ...

    def close(self) -> None:
        """Join it. Idempotent."""
        ...


class BatchLanes:
    """The host attends in a thread of its own; heads cross as the device says."""

    def __init__(self, device: Device, host: Device, trace: NoTrace = OFF) -> None:
        self.host, self._trace = host, trace
        emulation: Any = getattr(device, "emulation", None)
        self._thread: AttentionThread = InOrder("tpi-attention") if emulation is None else emulation.thread("attention")
        self._cross = cast("Callable[[int, bool], Event] | None", getattr(device, "cross", None))

    def attend(self, name: str, arrived: Callable[[], Given], call: Callable[[Given], T]) -> Pending[T]:
        """Begin a call of the host's kernels, after those before it, with what it then waits for.

        `name` is what traces call it.
        """

        def spanned() -> T:
            given = arrived()
            with self._trace.span("attention", name):
                return call(given)

        return self._thread.start(spanned)

    def cross(self, nbytes: int, up: bool) -> Event:
        """The end of a crossing of so many bytes of activations, which begins now.

        Devices whose kernels bring their results to the host, and fetch what they take, have nothing left to move.
        """
        return Finished(_nothing) if self._cross is None else self._cross(nbytes, up)

    def close(self) -> None:
        """Join the thread. Idempotent."""
        self._thread.close()


def _nothing() -> None:
    """There is nothing to move."""
