"""Copies in one direction, in the order in which they are asked for, beside those of other directions."""

from collections import deque
from threading import Lock

from tpi.devices.arena import Array
from tpi.devices.cuda.backend import Tensor, TorchLane, TorchMark
from tpi.devices.failures import close_all, explained


class CudaCopy:
    """The end of a copy. See `tpi.devices.base.Pending`."""

    __slots__ = ("_device", "_error", "_kept", "_mark")

    def __init__(self, device: str, kept: tuple[Array, Array]) -> None:
        """Holds on to both ends: they must not go before the copy has ended."""
        self._device = device
        self._kept = kept
        self._mark: TorchMark | None = None
        self._error: Exception | None = None

    def begin(self, lane: TorchLane, source: Tensor, target: Tensor) -> None:
        """Tell `lane` to copy; what fails is for `wait`."""
        try:
            with lane.use():
                target.copy_(source, non_blocking=True)
                self._mark = lane.mark()
        except Exception as error:  # noqa: BLE001 - it surfaces where the copy is awaited
            self._error = error

    @property
    def done(self) -> bool:
        """See `Pending.done`."""
        try:
            return self._mark is None or self._mark.done
        except Exception:  # noqa: BLE001 - the card failed, as `wait` will say
            return True

    def wait(self) -> None:
        """See `Pending.wait`.

        Raises:
            DeviceError: if the copy failed.
        """
        with explained(f"a copy to or from {self._device} failed", "choose another device"):
            if self._error is not None:
                raise self._error
            if self._mark is not None:
                self._mark.wait()


class CudaCopies:
    """One direction. May be used by several threads."""

    def __init__(self, device: str, lane: TorchLane) -> None:
        self._device = device
        self._lane = lane
        self._lock = Lock()
        self._begun: deque[CudaCopy] = deque()  # may still be going on, though nobody waits for it

    def copy(self, source: Tensor, target: Tensor, kept: tuple[Array, Array]) -> CudaCopy:
        """Begin a copy between 1-D uint8 tensors of one size; `kept` are the arrays that they are the memory of."""
        made = CudaCopy(self._device, kept)
        with self._lock:
            while self._begun and self._begun[0].done:
                self._begun.popleft()
            made.begin(self._lane, source, target)
            self._begun.append(made)
        return made

    def close(self) -> None:
        """Wait until every copy has ended, well or not."""
        with self._lock:
            while self._begun:
                close_all(self._begun.popleft().wait)
