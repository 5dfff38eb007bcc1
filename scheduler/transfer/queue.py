"""A queue of transfers and the threads that run them, three for each link (PIPO, sections 3.1.2 and 3.2.1).

A transfer is a function call with a list of transfers that must end before it. On each link, loads of weights start in
the order in which they were submitted, one at a time; so do loads of keys and values. Saves run when no load is ready,
several at once. Any thread may run any transfer.
"""

import threading
from collections.abc import Callable, Sequence

from scheduler.slots.wakeup import wake_soon
from tpi.errors import TpiError
from tpi.trace import OFF, NoTrace, TransferKind, clock

THREADS = 3  # threads for each link: as many as there are kinds of transfer
_ORDER: tuple[TransferKind, ...] = ("weight load", "kv load", "kv save")  # priority of transfers that are ready
_ONE_AT_A_TIME = {"weight load", "kv load"}


class QueuedTransfer:
    """One transfer. `wait` raises the error if this transfer, or one that it depends on, fails."""

    def __init__(
        self,
        kind: TransferKind,
        name: str,
        call: Callable[[], None],
        after: Sequence["QueuedTransfer"],
        link: int = 0,
        behind: "QueuedTransfer | None" = None,
    ) -> None:
        """Create a transfer. The arguments are those of `TransferQueue.submit`."""
        self.kind, self.name, self.link = kind, name, link
        self._call, self._after, self._behind = call, after, behind
        self.error: Exception | None = None
        self._ended = threading.Event()

    @property
    def done(self) -> bool:
        """True if the transfer has ended, so that `wait` does not block."""
        return self._ended.is_set()

    @property
    def ready(self) -> bool:
        """True if all transfers that must end before this one have ended, so that it may start."""
        return all(before.done for before in self._after) and (self._behind is None or self._behind.done)

    def wait(self) -> None:
        """Wait until the transfer has ended; raise its error, on every call."""
        self._ended.wait()
        if self.error is not None:
            raise self.error

    def join(self) -> None:
        """Wait until the transfer has ended, whether or not it failed."""
        self._ended.wait()

    def run(self) -> None:
        """Call the transfer's function, unless a transfer in `after` has failed."""
        try:
            for before in self._after:
                before.wait()
            self._call()
        except Exception as error:  # noqa: BLE001 - `wait` raises it
            self.error = error
        finally:
            self._finish()

    def cancel(self) -> None:
        """Cancel the transfer; `wait` then raises TpiError."""
        self.error = TpiError(f"the {self.kind} of {self.name} did not run: the transfer queue was closed")
        self._finish()

    def _finish(self) -> None:
        self._after, self._call, self._behind = (), lambda: None, None  # frees what they refer to
        self._ended.set()


class TransferQueue:
    """The transfers of one node.

    Several threads may use it. Close it before the memory and files that its transfers read and write.
    """

    def __init__(self, trace: NoTrace = OFF, links: int = 1) -> None:
        """Start the threads for `links` links, numbered from 0: one link for each accelerator."""
        self._trace = trace
        self._waiting: list[QueuedTransfer] = []  # in the order of submission
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
        """Queue a transfer: make `call` once every transfer in `after` has succeeded and `behind` has ended.

        Args:
            kind: the kind of transfer, which decides its order.
            name: the transfer's name in traces and errors.
            call: the function that does the transfer.
            after: transfers that must succeed first.
            link: the number of the link.
            behind: a transfer, submitted earlier, that must end first, even if it fails.

        Raises:
            TpiError: if the queue is closed.
        """
        transfer = QueuedTransfer(kind, name, call, tuple(after), link, behind)
        with self._lock:
            if self._closed:
                raise TpiError(f"{name} cannot be transferred: the transfer queue is closed; open the model again")
            self._waiting.append(transfer)
            self._work.notify()
        return transfer

    def close(self) -> None:
        """Cancel waiting transfers, wait for running ones, and join the threads. Further calls do nothing."""
        with self._lock:
            self._closed = True
            cancelled, self._waiting = self._waiting, []
            self._work.notify_all()
        for transfer in cancelled:
            transfer.cancel()
        for thread in self._threads:
            thread.join()

    def _serve(self) -> None:
        wake_soon()  # a link is idle from the end of a copy until its thread starts the next
        while (transfer := self._take()) is not None:
            began = clock()
            transfer.run()
            self._trace.add(transfer.kind, transfer.name, began, clock())
            with self._lock:
                self._running.remove(transfer)
                self._work.notify_all()

    def _take(self) -> QueuedTransfer | None:
        """Wait for a transfer that may start, and return it; return None once the queue is closed."""
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
