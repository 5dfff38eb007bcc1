"""The interface of a device: memory with a hard limit, copies into and out of it, and kernels that compute in it.

Weights, keys and values must lie in the memory of the device that computes with them. Activations cross the link: an
operation reads a block's input from host memory and writes its result to host memory.
"""

from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar, runtime_checkable

from tpi.devices.arena import Arena
from tpi.devices.pages import Bytes
from tpi.kernels import Kernels

T = TypeVar("T")
Result_co = TypeVar("Result_co", covariant=True)


class Pending(Protocol[Result_co]):
    """An operation that was started on a device and may still be running."""

    @property
    def done(self) -> bool:
        """True if `wait` would return at once."""
        ...

    def wait(self) -> Result_co:
        """Return the result once the operation has ended; if it failed, raise its error at every call."""
        ...


Event = Pending[None]
"""A pending copy; `wait` returns when the copy has ended."""


class Device(Protocol):
    """A device of a node: the host or an accelerator."""

    @property
    def name(self) -> str:
        """The device's name in messages and traces."""
        ...

    @property
    def kernels(self) -> Kernels:
        """The kernels that compute on weights, keys and values in this device's memory."""
        ...

    @property
    def memory(self) -> Arena:
        """The arena from which weights and KV pages are allocated."""
        ...

    def copy(self, source: Bytes, target: Bytes) -> Event:
        """Copy bytes between host memory and this device's, or within it.

        Neither array may change until the copy has ended.

        Raises:
            DeviceError: if the arrays differ in size, or neither lies in this device's memory.
        """
        ...

    def start(self, call: Callable[[], T]) -> Pending[T]:
        """Queue a call of this device's `kernels` behind the calls started before it. Return a pending operation.

        The host computes at once, in the calling thread. If several devices compute, start the host's call last.
        """
        ...

    def staging(self, size: int) -> Bytes:
        """Return `size` bytes of host memory that this device copies from and to at full speed (pinned if needed).

        The array is 1-D uint8, zeroed and aligned to a page. It is released when no array refers to it any more.
        """
        ...

    def close(self) -> None:
        """Wait until all started calls and copies have ended, then release threads and memory. Further calls do
        nothing.
        """
        ...


@runtime_checkable
class Identified(Protocol):
    """A device with an identity that stays the same between runs, even if the device's index changes."""

    @property
    def identity(self) -> str:
        """Model, UUID or bus address, and driver version: everything that the device's speed depends on."""
        ...


@runtime_checkable
class Sharing(Protocol):
    """A device whose memory may be the host's. Its allocations then also count towards the host's memory budget."""

    @property
    def shares_memory(self) -> bool:
        """True if the device's memory is the host's, as with an integrated GPU."""
        ...


def shares_memory(device: Device) -> bool:
    """Return True if the memory of `device` is the host's."""
    return isinstance(device, Sharing) and device.shares_memory


def identity_of(device: Device) -> str:
    """Return the key under which measurements of `device` are stored: its identity, or its name if it has none."""
    return device.identity if isinstance(device, Identified) else device.name


class Finished(Generic[T]):
    """A call that has already ended (`Pending`): its result or its exception."""

    __slots__ = ("_error", "_value")
    done = True

    def __init__(self, call: Callable[[], T]) -> None:
        """Make the call. `wait` raises its exception later; KeyboardInterrupt and SystemExit are raised here."""
        self._error: Exception | None = None
        try:
            self._value = call()
        except Exception as error:  # noqa: BLE001 - `wait` raises it
            self._error = error

    def wait(self) -> T:
        """Return the result of the call, or raise the error that it raised."""
        if self._error is not None:
            raise self._error
        return self._value


def wait_all(pending: Sequence[Pending[T]]) -> list[T]:
    """Return all results in order; if calls failed, raise the first failure once every call has ended."""
    ended = [Finished(each.wait) for each in pending]
    return [each.wait() for each in ended]
