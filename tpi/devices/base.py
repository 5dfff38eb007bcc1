"""What computes inside a node: memory with a hard limit, copies into and out of it, and kernels that compute there.

Weights, keys and values must lie in the memory of the device that computes with them. Activations cross: operations
take a block's input from the host's memory and give their result there.
"""

from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar, runtime_checkable

from tpi.devices.arena import Arena
from tpi.devices.pages import Bytes
from tpi.kernels import Kernels

T = TypeVar("T")
Result_co = TypeVar("Result_co", covariant=True)


class Pending(Protocol[Result_co]):
    """What a device was told to do, and may still be doing."""

    @property
    def done(self) -> bool:
        """Whether `wait` would return at once."""
        ...

    def wait(self) -> Result_co:
        """The result, when it is there; raises what failed, every time."""
        ...


Event = Pending[None]
"""The end of a copy."""


class Device(Protocol):
    """One of a node's devices."""

    @property
    def name(self) -> str:
        """What messages and traces call it."""
        ...

    @property
    def kernels(self) -> Kernels:
        """What it can compute, on its own memory."""
        ...

    @property
    def memory(self) -> Arena:
        """What weights and pages are allocated in."""
        ...

    def copy(self, source: Bytes, target: Bytes) -> Event:
        """Copy bytes between the host's memory and this device's, or within it; both stay as they are until the end.

        Raises:
            DeviceError: if they differ in size, or neither lies in this device's memory.
        """
        ...

    def start(self, call: Callable[[], T]) -> Pending[T]:
        """Begin a call of this device's `kernels`, after all that was started here before.

        The host computes at once, in the thread that asks: start it last.
        """
        ...

    def staging(self, size: int) -> Bytes:
        """Memory of the host that this device copies from and to at full speed (pinned, where that matters).

        1-D uint8, zeroed, from the start of a page on; it goes when nothing refers to it any more.
        """
        ...

    def close(self) -> None:
        """End its threads when they have done what was started; its memory is gone with it. Idempotent."""
        ...


@runtime_checkable
class Identified(Protocol):
    """A device that tells itself from others, whatever its number is today."""

    @property
    def identity(self) -> str:
        """Its model, its UUID or place, and the version of its driver: all that its speed depends on."""
        ...


@runtime_checkable
class Sharing(Protocol):
    """A device that may lie in the host's memory: what it holds then counts in the host's budget, too."""

    @property
    def shares_memory(self) -> bool:
        """Whether its memory is the host's, as an integrated chip's is."""
        ...


def shares_memory(device: Device) -> bool:
    """Return whether the memory of `device` is the host's."""
    return isinstance(device, Sharing) and device.shares_memory


def identity_of(device: Device) -> str:
    """Return what figures of `device` are remembered by: its identity, or its name where it has none."""
    return device.identity if isinstance(device, Identified) else device.name


class Finished(Generic[T]):
    """What was done at once."""

    __slots__ = ("_error", "_value")
    done = True

    def __init__(self, call: Callable[[], T]) -> None:
        """Make the call; what it raises is for `wait`, but for what is meant to stop the program."""
        self._error: Exception | None = None
        try:
            self._value = call()
        except Exception as error:  # noqa: BLE001 - it surfaces where the result is awaited
            self._error = error

    def wait(self) -> T:
        """See `Pending.wait`."""
        if self._error is not None:
            raise self._error
        return self._value


def wait_all(pending: Sequence[Pending[T]]) -> list[T]:
    """The results in order; the first failure is raised when all have ended, so that their memory is free again."""
    ended = [Finished(each.wait) for each in pending]
    return [each.wait() for each in ended]
