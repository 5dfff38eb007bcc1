"""One queue of transfers and the threads that make them, three for each link (PIPO, sections 3.1.2 and 3.2.1).

A transfer is a call with what it waits for. On each link loads of weights start in the order in which they were asked
for, one at a time, and so do loads of keys and values; saves go when no load is ready, several at once. Nothing is
bound to a thread.
"""

import threading
from collections.abc import Callable, Sequence

from scheduler.window.wakeup import wake_soon
from tpi.errors import TpiError
from tpi.trace import OFF, NoTrace, TransferKind, clock

THREADS = 3  # for each link: as many as there are kinds of transfer
_ORDER: tuple[TransferKind, ...] = ("weight load", "kv load", "kv save")  # what is ready first goes first, then by kind
_ONE_AT_A_TIME = {"weight load", "kv load"}


class QueuedTransfer:
    """One transfer; `wait` raises what it failed with, or what any that it waited for failed with."""

    def __init__(
        self,
        kind: TransferKind,
        name: str,
        call: Callable[[], None],
        after: Sequence["QueuedTransfer"],
        link: int = 0,
        behind: "QueuedTransfer | None" = None,
    ) -> None:
        """See `TransferQueue.submit`."""
        self.kind, self.name, self.link = kind, name, link
        self._call, self._after, self._behind = call, after, behind
        self.error: Exception | None = None  # what it failed with
        self._ended = threading.Event()

    @property
    def done(self) -> bool:
        """Whether `wait` would return at once."""
        return self._ended.is_set()

    @property
    def ready(self) -> bool:
        """Whether all that it waits for is over."""
        return all(before.done for before in self._after) and (self._behind is None or self._behind.done)

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
        self._after, self._call, self._behind = (), _nothing, None  # what they refer to may go
        self._ended.set()


class TransferQueue:
    """Transfers of one node. May be used by several threads; close it before what its transfers read and write."""

    def __init__(self, trace: NoTrace = OFF, links: int = 1) -> None:
        """Over so many links, numbered from 0 on: one for each accelerator."""
        self._trace = trace
        self._waiting: list[QueuedTransfer] = []  # in the order of asking
        self._running: list[QueuedTransfer] = []
        self._closed = False
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._threads = [
            threading.Thread(target=self._serve, name=f"tpi-transfer-{n}", daemon=True) for n in range(THREADS * links)
        ]
        for thread in self._threads:
            thread.start()

    def submit(
        self,
        kind: TransferKind,
        name: str,
        call: Callable[[], None],
        after: Sequence[QueuedTransfer] = (),
        link: int = 0,
        behind: QueuedTransfer | None = None,
    ) -> QueuedTransfer:
        """Have `call` made when every transfer of `after` has succeeded; `name` is what traces and errors call it.

        And when `behind`, which was asked for earlier, is over, whatever came of it.

        Raises:
            TpiError: if the queue is closed.
        """
        transfer = QueuedTransfer(kind, name, call, tuple(after), link, behind)
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
        for kind in _ORDER:
            before = {transfer.link for transfer in self._running if transfer.kind == kind}
            for transfer in self._waiting:
                if transfer.kind == kind:
                    if transfer.ready and not (kind in _ONE_AT_A_TIME and transfer.link in before):
                        return transfer
                    before.add(transfer.link)  # loads never overtake one another
        return None


def _nothing() -> None:
    """What is left of a transfer that is over."""
