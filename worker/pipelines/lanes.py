"""The host's work for a batch while the accelerator computes: attention, additions, and transfers of heads."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

from tpi.devices.base import Device, Event, Finished, Pending
from tpi.devices.callqueue import CallQueue
from tpi.kernels import Kernels
from tpi.trace import OFF, NoTrace

T = TypeVar("T")
Given = TypeVar("Given")


class BatchLanes:
    """A host thread for attention, another for residual connections, and the transfers of heads over the link."""

    def __init__(self, device: Device, host: Device, trace: NoTrace = OFF, adds_there: bool = True) -> None:
        """Start the threads.

        Args:
            device: the accelerator.
            host: the host's device.
            trace: recorder of the host's attention.
            adds_there: True if the accelerator adds residual connections, in the order of its calls; False: the host.
        """
        self.device, self.host, self._trace = device, host, trace
        self.adds_there = adds_there
        emulation: Any = getattr(device, "emulation", None)
        open_thread = CallQueue if emulation is None else emulation.thread
        self._thread, self._adding = (open_thread(f"tpi-{name}") for name in ("attention", "adding"))
        self._cross = cast("Callable[[int, bool], Event] | None", getattr(device, "cross", None))

    def attend(self, name: str, arrived: Callable[[], Given], call: Callable[[Given], T]) -> Pending[T]:
        """Start a call of the host's kernels after all earlier ones, and return its pending result.

        Args:
            name: the call's name in traces.
            arrived: called in the host's thread first; waits for the input of `call` and returns it.
            call: computes the result.
        """

        def spanned() -> T:
            given = arrived()
            with self._trace.span("attention", name):
                return call(given)

        return self._thread.start(spanned)

    def add(self, call: Callable[[Kernels], None]) -> Pending[None]:
        """Queue `call`, which adds to hidden states, on the accelerator if `adds_there`, else on a host thread.

        It runs after all calls queued before it, and gets the kernels of its device.
        """
        if self.adds_there:
            return self.device.start(lambda: call(self.device.kernels))
        return self._adding.start(lambda: call(self.host.kernels))

    def transfer_activations(self, nbytes: int, up: bool) -> Event:
        """Start a transfer of `nbytes` bytes of activations: to the accelerator if `up` is True, else from it.

        Return an event that is done when the transfer has ended. On devices whose kernels copy inputs and results
        themselves, transfer nothing and return an event that is done.
        """
        return Finished(lambda: None) if self._cross is None else self._cross(nbytes, up)

    def close(self) -> None:
        """Join the threads. Further calls do nothing."""
        self._thread.close()
        self._adding.close()
