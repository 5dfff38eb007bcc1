"""Workers that are called in the background: lost workers that may return, and workers that could not join before."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from master.workers.remote import RemoteWorker
from tpi.errors import NodeInUse, NodeRefused, NodeTwice, TpiError
from worker.profile import memory_budget

RETRY_S = 2.0  # seconds until a worker that refused or hung up is called again
ROOM_S = 30.0  # seconds until a worker with too little memory, or without trust in this machine's key, is asked again
_MOST_ANNOUNCED = 3  # addresses per key, the newest: announcements are not authenticated


@dataclass(eq=False)
class _Call:
    address: str
    worker: RemoteWorker | None = None
    next_at: float = 0.0
    begin_at: float = 0.0  # earliest time of the next call, in `since_boot` seconds
    above: int = 0  # the worker may join if it has more than this many bytes of memory
    key: bytes = b""  # only the owner of this key is wanted; empty: any trusted worker
    announced: bool = False  # the address was announced, and no worker has answered there yet

    def at(self, address: str, key: bytes) -> bool:
        """Return True if this call is to `address` and the owner of `key` may answer it."""
        return self.address == address and (self.key == key or not self.key or not key)

    @property
    def met(self) -> bool:
        """True if a worker has answered this call."""
        return self.worker is not None and self.worker.hello is not None


class Recruits:
    """List of addresses that are called again and again, until the worker that answers is taken.

    Only one thread at a time may use it. No method blocks.
    """

    def __init__(self, call: Callable[[str, bytes], RemoteWorker]) -> None:
        """Create an empty list. `call(address, key)` starts a call to the owner of `key` (empty: any worker)."""
        self.look_over: Callable[[RemoteWorker], None] | None = None  # admits workers, now or later; None: all are
        self._call = call
        self._calls: list[_Call] = []

    def seek(self, address: str, begin_at: float = 0.0, above: int = 0, key: bytes = b"") -> None:
        """Call the worker at `address` again and again, from `begin_at` (`since_boot` seconds) on, until it may join.

        It may join when more than `above` bytes of its memory can be used. With a `key`, only its owner is accepted.
        """
        if all(not one.at(address, key) for one in self._calls):
            self._calls.append(_Call(address, next_at=begin_at, begin_at=begin_at, above=above, key=key))

    def try_announced(self, address: str, key: bytes) -> None:
        """Call `address`, at which the owner of `key` was announced. Only the newest announcements are tried.

        If the worker is called at other addresses already, the same conditions apply at this one: not before the latest
        `begin_at`, and with memory above the largest `above`.
        """
        if any(one.at(address, key) for one in self._calls):
            return
        same = [one for one in self._calls if one.key == key]
        above, begin_at = max((one.above for one in same), default=0), max((one.begin_at for one in same), default=0.0)
        self._calls.append(_Call(address, next_at=begin_at, begin_at=begin_at, above=above, key=key, announced=True))
        said = [one for one in self._calls if one.announced and one.key == key and not one.met]
        self._forget(said[:-_MOST_ANNOUNCED])

    def misses(self, key: bytes) -> bool:
        """Return True if the owner of `key` is being called at an address where it has answered before."""
        return any(one.key == key and not one.announced for one in self._calls)

    @property
    def addresses(self) -> list[str]:
        """The addresses of the workers that are called."""
        return [one.address for one in self._calls]

    def tend(self, now: float) -> None:
        """Process messages that have arrived, and call the addresses that are due; `now` in `since_boot` seconds."""
        look_over = self.look_over  # another thread may set the attribute to None
        for one in self._calls:
            if one.worker is None and now >= one.next_at:
                self._begin(one, now)
            if one.worker is not None:
                one.worker.serve()
                if (problem := one.worker.problem) is not None:
                    shut = isinstance(problem, NodeRefused) and not isinstance(problem, NodeInUse | NodeTwice)
                    self._hang_up(one, now + (ROOM_S if shut else RETRY_S))
                elif one.worker.hello and memory_budget(one.worker.hello.profile) <= one.above:
                    self._hang_up(one, now + ROOM_S)  # other masters may use it meanwhile
                elif look_over and one.worker.admitted is None and _free(one.worker):
                    one.worker.admitted = False
                    look_over(one.worker)

    @property
    def called(self) -> list[RemoteWorker]:
        """The workers that are being called or have answered."""
        return [one.worker for one in self._calls if one.worker]

    @property
    def ready(self) -> list[RemoteWorker]:
        """The workers that have answered and may be used now."""
        return [worker for worker in self.called if _free(worker) and (self.look_over is None or worker.admitted)]

    @property
    def sockets(self) -> Iterator[object]:
        """Sockets to poll while waiting."""
        for worker in self.called:
            yield from worker.sockets

    def take(self) -> list[RemoteWorker]:
        """Return the ready workers, which then belong to the caller, and stop all calls to these workers."""
        taken = [one for one in self._calls if one.worker in self.ready]
        self._calls = [one for one in self._calls if one not in taken]
        for found in taken:
            self._found(found)
        return [one.worker for one in taken if one.worker]

    def close(self) -> None:
        """Close the connections to all workers that are called."""
        self._forget(self._calls)

    def _found(self, found: _Call) -> None:
        """Stop the calls to the same worker at its other addresses, known and announced ones.

        `found` is the call that the worker answered.
        """
        key = found.worker.key if found.worker else b""
        others = [one for one in self._calls if key and one.key == key and not one.met]
        if found.announced:
            self._forget([one for one in others if not one.announced][:1])
        if not self.misses(key):
            self._forget([one for one in others if one.announced])

    def _forget(self, calls: Sequence[_Call]) -> None:
        for one in calls:
            if one.worker is not None:
                one.worker.close(0)
        self._calls = [one for one in self._calls if one not in calls]

    def _begin(self, one: _Call, now: float) -> None:
        try:
            one.worker = self._call(one.address, one.key)
        except TpiError:  # its key was revoked, this machine's key cannot be used, or too many files are open
            one.next_at = now + RETRY_S

    def _hang_up(self, one: _Call, next_at: float) -> None:
        assert one.worker
        one.worker.close(0)
        one.worker, one.next_at = None, next_at


def _free(worker: RemoteWorker) -> bool:
    """Return True if the worker serves this master already and computes nothing.

    A worker that hangs is never free.
    """
    return worker.hello is not None and worker.connected and worker.idle
