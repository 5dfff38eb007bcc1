"""What runs beside a node's accelerator for a batch: the host's attention, and heads that cross between the two."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

from tpi.devices.base import Device, Event, Finished, Pending
from tpi.devices.inorder import InOrder
from tpi.kernels import Kernels
from tpi.trace import OFF, NoTrace

T = TypeVar("T")
Given = TypeVar("Given")


class BatchLanes:
    """The host attends in a thread of its own, and adds in another; heads cross as the device says."""

    def __init__(self, device: Device, host: Device, trace: NoTrace = OFF, adds_there: bool = True) -> None:
        """`adds_there`: the accelerator adds residual connections, in the order of its calls."""
        self.device, self.host, self._trace = device, host, trace
        self.adds_there = adds_there
        emulation: Any = getattr(device, "emulation", None)
        open_thread = InOrder if emulation is None else emulation.thread
        self._thread, self._adding = (open_thread(f"tpi-{name}") for name in ("attention", "adding"))
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

    def add(self, call: Callable[[Kernels], None]) -> Pending[None]:
        """Have hidden states moved on by whoever adds, with its kernels, after those before them."""
        if self.adds_there:
            return self.device.start(lambda: call(self.device.kernels))
        return self._adding.start(lambda: call(self.host.kernels))

    def cross(self, nbytes: int, up: bool) -> Event:
        """The end of a crossing of so many bytes of activations, which begins now.

        Devices whose kernels bring their results to the host, and fetch what they take, have nothing left to move.
        """
        return Finished(_nothing) if self._cross is None else self._cross(nbytes, up)

    def close(self) -> None:
        """Join the threads. Idempotent."""
        self._thread.close()
        self._adding.close()


def _nothing() -> None:
    """There is nothing to move."""
