"""One queue of transfers and the three threads that make them (PIPO, sections 3.1.2 and 3.2.1).

A transfer is a call with what it waits for. Loads of weights start in the order in which they were asked for, one at a
time, and so do loads of keys and values; saves go when no load is ready, several at once. Nothing is bound to a thread.
"""

import threading
from collections.abc import Callable, Sequence

from scheduler.window.wakeup import wake_soon
from tpi.errors import TpiError
from tpi.trace import OFF, NoTrace, TransferKind, clock

THREADS = 3  # as many as there are kinds of transfer
_ORDER: tuple[TransferKind, ...] = ("weight load", "kv load", "kv save")  # what is ready first goes first, then by kind
_ONE_AT_A_TIME = {"weight load", "kv load"}


class QueuedTransfer:
    """One transfer; `wait` raises what it failed with, or what any that it waited for failed with."""

    def __init__(
        self, kind: TransferKind, name: str, call: Callable[[], None], after: Sequence["QueuedTransfer"]
    ) -> None:
        """See `TransferQueue.submit`."""
        self.kind, self.name = kind, name
        self._call, self._after = call, after
        self.error: Exception | None = None  # what it failed with
        self._ended = threading.Event()

    @property
    def done(self) -> bool:
        """Whether `wait` would return at once."""
        return self._ended.is_set()

    @property
    def ready(self) -> bool:
        """Whether all that it waits for is over."""
        return all(before.done for before in self._after)

    def wait(self) -> None:
        """Until it is over; raises what failed, every time."""
        self._ended.wait()
        if self.error is not None:
            raise self.error

    def join(self) -> None:
        """Until it is over, whatever came of it."""
        self._ended.wait()

    def run(self) -> None:
        """Make the call, unless what it waited for failed."""
        try:
            for before in self._after:
                before.wait()
            self._call()
        except Exception as error:  # noqa: BLE001 - it surfaces where the transfer is awaited
            self.error = error
        finally:
            self._finish()

    def cancel(self) -> None:
        """It is not made any more; whoever waits for it is told."""
        self.error = TpiError(f"the transfer queue was closed before the {self.kind} of {self.name}")
        self._finish()

    def _finish(self) -> None:
        self._after, self._call = (), _nothing  # what they refer to may go
        self._ended.set()


class TransferQueue:
    """Transfers of one node. May be used by several threads; close it before what its transfers read and write."""

    def __init__(self, trace: NoTrace = OFF) -> None:
        self._trace = trace
        self._waiting: list[QueuedTransfer] = []  # in the order of asking
        self._running: list[QueuedTransfer] = []
        self._closed = False
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._threads = [
            threading.Thread(target=self._serve, name=f"tpi-transfer-{n}", daemon=True) for n in range(THREADS)
        ]
        for thread in self._threads:
            thread.start()

    def submit(
        self, kind: TransferKind, name: str, call: Callable[[], None], after: Sequence[QueuedTransfer] = ()
    ) -> QueuedTransfer:
        """Have `call` made when every transfer of `after` has succeeded; `name` is what traces and errors call it.

        Raises:
            TpiError: if the queue is closed.
        """
        transfer = QueuedTransfer(kind, name, call, tuple(after))
        with self._lock:
            if self._closed:
                raise TpiError(f"the transfer queue is closed; {name} cannot be moved any more")
            self._waiting.append(transfer)
            self._work.notify()
        return transfer

    def close(self) -> None:
        """Make no more transfers, and join the threads when those under way are over. Idempotent."""
        with self._lock:
            self._closed = True
            cancelled, self._waiting = self._waiting, []
            self._work.notify_all()
        for transfer in cancelled:
            transfer.cancel()
        for thread in self._threads:
            thread.join()

    def _serve(self) -> None:
        wake_soon()  # a link is idle until whoever saw the end of a copy asks for the next
        while (transfer := self._take()) is not None:
            began = clock()
            transfer.run()
            self._trace.add(transfer.kind, transfer.name, began, clock())
            with self._lock:
                self._running.remove(transfer)
                self._work.notify_all()

    def _take(self) -> QueuedTransfer | None:
        """The next transfer that may start; None once the queue is closed."""
        with self._lock:
            while not self._closed:
                chosen = self._next()
                if chosen is not None:
                    self._waiting.remove(chosen)
                    self._running.append(chosen)
                    return chosen
                self._work.wait()
        return None

    def _next(self) -> QueuedTransfer | None:
        busy = {transfer.kind for transfer in self._running} & _ONE_AT_A_TIME
        for kind in _ORDER:
            if kind in busy:
                continue
            mine = [transfer for transfer in self._waiting if transfer.kind == kind]
            candidates = mine[:1] if kind in _ONE_AT_A_TIME else mine  # loads never overtake one another
            for transfer in candidates:
                if transfer.ready:
                    return transfer
        return None


def _nothing() -> None:
    """What is left of a transfer that is over."""
