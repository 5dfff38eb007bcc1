"""The part of torch that a CUDA device uses, on the CPU: no Triton here."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import RLock

import torch

from tpi.devices.cuda.backend import RecordingStream, Tensor, TorchEvent


class CpuBackend:
    """Torch on the CPU: all work is done at once. Kernels need Triton's interpreter (`TRITON_INTERPRET=1`)."""

    name = identity = "cuda (emulated)"
    shares_memory = False
    device = torch.device("cpu")

    def lane(self) -> RecordingStream:
        """Return a lane that does all work at once."""
        return CpuLane()

    def zeros(self, size: int) -> Tensor:
        """Return `size` zeroed bytes, 1-D uint8."""
        return torch.zeros(size, dtype=torch.uint8)

    def pin(self, address: int, size: int) -> Callable[[], object] | None:
        """Return a function that does nothing: the device reads all host memory at full speed."""
        return lambda: None


class CpuLane:
    """A lane that does all work at once.

    One thread uses it at a time: Triton's interpreter has a single global state.
    """

    done = True
    _turn = RLock()

    @contextmanager
    def use(self) -> Iterator[None]:
        """Lock the interpreter for the caller."""
        with self._turn:
            yield

    def record(self, call: Callable[[], object]) -> Callable[[], object]:
        """Return `call`: the interpreter records nothing."""
        return call

    def mark(self) -> TorchEvent:
        """Return a mark whose work is done already."""
        return self

    def wait(self) -> None:
        """Do nothing: all work is done already."""
