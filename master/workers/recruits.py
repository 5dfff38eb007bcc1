"""Workers that are called in the background: lost ones that may come back, and others that could not help before."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from master.workers.remote import RemoteWorker
from tpi.errors import NodeInUse, NodeRefused, NodeTwice, TpiError
from worker.profile import memory_budget

RETRY_S = 2.0  # until a worker that said no, or hung up, is called again
ROOM_S = 30.0  # until one that has too little memory is asked again how much that is, or lets nobody of here in
_MOST_ANNOUNCED = 3  # addresses under one key, the newest: whoever likes announces under any key what he likes


@dataclass(eq=False)
class _Call:
    address: str
    worker: RemoteWorker | None = None
    next_at: float = 0.0
    begin_at: float = 0.0  # when it may be called first
    above: int = 0  # bytes of memory: with more than these it may help
    key: bytes = b""  # whose owner alone is wanted there; empty: anybody who is trusted
    announced: bool = False  # it is not where anybody was met

    def at(self, address: str, key: bytes) -> bool:
        """Whether it is a call to that address which may be answered by the owner of `key`."""
        return self.address == address and (self.key == key or not self.key or not key)

    @property
    def met(self) -> bool:
        """Whether a worker has answered."""
        return self.worker is not None and self.worker.hello is not None


class Recruits:
    """Calls every address again and again, until whoever answers is taken. One thread at a time uses it; none waits."""

    def __init__(self, call: Callable[[str, bytes], RemoteWorker]) -> None:
        """`call` begins a call to an address, for the owner of a key."""
        self.look_over: Callable[[RemoteWorker], None] | None = None  # admits who comes, now or later; None: all are
        self._call = call
        self._calls: list[_Call] = []

    def seek(self, address: str, begin_at: float = 0.0, above: int = 0, key: bytes = b"") -> None:
        """Call `address`, from `begin_at` (`since_boot` seconds) on, until it has more than `above` bytes to use.

        With a `key` its owner alone is called.
        """
        if all(not one.at(address, key) for one in self._calls):
            self._calls.append(_Call(address, next_at=begin_at, begin_at=begin_at, above=above, key=key))

    def try_announced(self, address: str, key: bytes) -> None:
        """Call `address`, where somebody says that the owner of `key` is; of all that is said the newest counts.

        An owner who is to be left alone for a while, or to have more memory first, is so at every address.
        """
        if any(one.at(address, key) for one in self._calls):
            return
        same = [one for one in self._calls if one.key == key]
        above, begin_at = max((one.above for one in same), default=0), max((one.begin_at for one in same), default=0.0)
        self._calls.append(_Call(address, next_at=begin_at, begin_at=begin_at, above=above, key=key, announced=True))
        said = [one for one in self._calls if one.announced and one.key == key and not one.met]
        self._forget(said[:-_MOST_ANNOUNCED])

    def misses(self, key: bytes) -> bool:
        """Whether an owner of `key` is called where it was met."""
        return any(one.key == key and not one.announced for one in self._calls)

    @property
    def addresses(self) -> list[str]:
        """Of all that are called now or again."""
        return [one.address for one in self._calls]

    def tend(self, now: float) -> None:
        """Take in what has arrived, and call those again whose time has come; `now` in `since_boot` seconds."""
        look_over = self.look_over  # another thread may put None there
        for one in self._calls:
            if one.worker is None and now >= one.next_at:
                self._begin(one, now)
            if one.worker is not None:
                one.worker.serve()
                if (problem := one.worker.problem) is not None:
                    shut = isinstance(problem, NodeRefused) and not isinstance(problem, NodeInUse | NodeTwice)
                    self._hang_up(one, now + (ROOM_S if shut else RETRY_S))
                elif one.worker.hello and memory_budget(one.worker.hello.profile) <= one.above:
                    self._hang_up(one, now + ROOM_S)  # others may use it meanwhile
                elif look_over and one.worker.admitted is None and _free(one.worker):
                    one.worker.admitted = False
                    look_over(one.worker)

    @property
    def called(self) -> list[RemoteWorker]:
        """Those that are being called, or have answered."""
        return [one.worker for one in self._calls if one.worker]

    @property
    def ready(self) -> list[RemoteWorker]:
        """Those that may be used."""
        return [worker for worker in self.called if _free(worker) and (self.look_over is None or worker.admitted)]

    @property
    def sockets(self) -> Iterator[object]:
        """What to poll while waiting."""
        for worker in self.called:
            yield from worker.sockets

    def take(self) -> list[RemoteWorker]:
        """Those that are ready; they are the caller's from now on, and are not called any more, wherever else."""
        taken = [one for one in self._calls if one.worker in self.ready]
        self._calls = [one for one in self._calls if one not in taken]
        for found in taken:
            self._found(found)
        return [one.worker for one in taken if one.worker]

    def close(self) -> None:
        """Hang up."""
        self._forget(self._calls)

    def _found(self, found: _Call) -> None:
        """Forget where else the same worker was looked for: where it was met, and where it was said to be."""
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
        except TpiError:  # its key was revoked, this machine's is unusable, or too much is open
            one.next_at = now + RETRY_S

    def _hang_up(self, one: _Call, next_at: float) -> None:
        assert one.worker
        one.worker.close(0)
        one.worker, one.next_at = None, next_at


def _free(worker: RemoteWorker) -> bool:
    """Whether it serves this master already, and computes nothing; one that hangs never says so."""
    return worker.hello is not None and worker.connected and worker.idle
