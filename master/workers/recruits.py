"""Workers that are called in the background: lost ones that may come back, and others that could not help before."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from master.workers.remote import RemoteWorker
from tpi.errors import TpiError
from worker.profile import memory_budget

RETRY_S = 2.0  # until a worker that said no, or hung up, is called again
ROOM_S = 30.0  # until one that has too little memory is asked again how much that is


@dataclass
class _Call:
    address: str
    worker: RemoteWorker | None = None
    next_at: float = 0.0
    above: int = 0  # bytes of memory: with more than these it may help


class Recruits:
    """Calls every address again and again, until whoever answers is taken. One thread at a time uses it; none waits."""

    def __init__(self, call: Callable[[str], RemoteWorker]) -> None:
        self._call = call
        self._calls: list[_Call] = []

    def seek(self, address: str, begin_at: float = 0.0, above: int = 0) -> None:
        """Call `address`, from `begin_at` (`since_boot` seconds) on, until it has more than `above` bytes to use."""
        if all(one.address != address for one in self._calls):
            self._calls.append(_Call(address, next_at=begin_at, above=above))

    def tend(self, now: float) -> None:
        """Take in what has arrived, and call those again whose time has come; `now` in `since_boot` seconds."""
        for one in self._calls:
            if one.worker is None and now >= one.next_at:
                self._begin(one, now)
            if one.worker is not None:
                one.worker.serve()
                if one.worker.problem is not None:
                    self._hang_up(one, now + RETRY_S)
                elif one.worker.hello and memory_budget(one.worker.hello.profile) <= one.above:
                    self._hang_up(one, now + ROOM_S)  # others may use it meanwhile

    @property
    def called(self) -> list[RemoteWorker]:
        """Those that are being called, or have answered."""
        return [one.worker for one in self._calls if one.worker]

    @property
    def ready(self) -> list[RemoteWorker]:
        """Those that may be used: they serve this master already, and compute nothing; one that hangs never says so."""
        return [worker for worker in self.called if worker.hello and worker.connected and worker.idle]

    @property
    def sockets(self) -> Iterator[object]:
        """What to poll while waiting."""
        for worker in self.called:
            yield from worker.sockets

    def take(self) -> list[RemoteWorker]:
        """Those that are ready; they are the caller's from now on, and are not called any more."""
        taken = self.ready
        self._calls = [one for one in self._calls if one.worker not in taken]
        return taken

    def close(self) -> None:
        """Hang up."""
        for one in self._calls:
            if one.worker is not None:
                one.worker.close(0)
        self._calls = []

    def _begin(self, one: _Call, now: float) -> None:
        try:
            one.worker = self._call(one.address)
        except TpiError:  # its key was revoked, or this machine's is unusable
            one.next_at = now + RETRY_S

    def _hang_up(self, one: _Call, next_at: float) -> None:
        assert one.worker
        one.worker.close(0)
        one.worker, one.next_at = None, next_at
