"""A shuffled device with a separate thread for calls, so that a call may wait for a copy."""

from collections.abc import Callable
from typing import TypeVar

from tests.support.devices.shuffled import Shuffled
from tpi.devices.base import Event, Pending
from tpi.devices.callqueue import CallQueue
from tpi.devices.host import check_sizes
from tpi.devices.pages import Bytes
from tpi.kernels import Kernels

T = TypeVar("T")


class SeparateCalls(Shuffled):
    """A `Shuffled` device with a thread for calls. Bytes that a copy has not reached yet are torn."""

    name = "apart"

    def __init__(self, kernels: Kernels, seed: int, failing: Callable[[int], bool] = lambda _: False) -> None:
        super().__init__(kernels, seed, failing)
        self._computing = CallQueue("apart-compute")

    def __enter__(self) -> "SeparateCalls":
        return self

    def start(self, call: Callable[[], T]) -> Pending[T]:
        return self._computing.start(call)

    def copy(self, source: Bytes, target: Bytes) -> Event:
        check_sizes(source, target)
        target[:] = 255
        return super().copy(source, target)

    def close(self) -> None:
        self._computing.close()
        super().close()
