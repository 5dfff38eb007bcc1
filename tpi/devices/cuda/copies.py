"""Copies between host and card in one direction: in order, and in parallel to copies in the other direction."""

from collections import deque
from threading import Lock

from tpi.devices.arena import Array
from tpi.devices.cuda.backend import Tensor, TorchEvent, TorchStream
from tpi.devices.failures import close_all, explained


class CudaCopy:
    """A pending copy (`tpi.devices.base.Pending`)."""

    __slots__ = ("_device", "_error", "_kept", "_mark")

    def __init__(self, device: str, kept: tuple[Array, Array]) -> None:
        """Create a copy that is not started; it refers to both arrays, so that their memory outlives it."""
        self._device = device
        self._kept = kept
        self._mark: TorchEvent | None = None
        self._error: Exception | None = None

    def begin(self, lane: TorchStream, source: Tensor, target: Tensor) -> None:
        """Start copying in the stream `lane`. If that fails, `wait` raises the error."""
        try:
            with lane.use():
                target.copy_(source, non_blocking=True)
                self._mark = lane.mark()
        except Exception as error:  # noqa: BLE001 - `wait` raises it
            self._error = error

    @property
    def done(self) -> bool:
        """True if `wait` would return at once."""
        try:
            return self._mark is None or self._mark.done
        except Exception:  # noqa: BLE001 - the card failed; `wait` raises
            return True

    def wait(self) -> None:
        """Wait for the end of the copy.

        Raises:
            DeviceError: if the copy failed.
        """
        with explained(f"a copy to or from {self._device} failed", "choose another device"):
            if self._error is not None:
                raise self._error
            if self._mark is not None:
                self._mark.wait()


class CudaCopies:
    """The copies between host and card in one direction. Several threads may use it at once."""

    def __init__(self, device: str, lane: TorchStream) -> None:
        self._device = device
        self._lane = lane
        self._lock = Lock()
        self._begun: deque[CudaCopy] = deque()  # copies that may still be running, even if no thread waits for them

    def copy(self, source: Tensor, target: Tensor, kept: tuple[Array, Array]) -> CudaCopy:
        """Start a copy between 1-D uint8 tensors of one size. `kept` are the arrays whose memory the tensors use."""
        made = CudaCopy(self._device, kept)
        with self._lock:
            while self._begun and self._begun[0].done:
                self._begun.popleft()
            made.begin(self._lane, source, target)
            self._begun.append(made)
        return made

    def close(self) -> None:
        """Wait until every copy has ended, even if some failed."""
        with self._lock:
            while self._begun:
                close_all(self._begun.popleft().wait)
