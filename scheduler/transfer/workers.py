"""An adapter with which the threads of a transfer queue fill the slots of a `scheduler.slots.cache.SlotCache`."""

from collections import deque
from collections.abc import Sequence
from functools import partial

from scheduler.slots.shelf import Load
from scheduler.slots.workers import Serve
from scheduler.transfer.queue import QueuedTransfer, TransferQueue

_SPARE = Load(None, (), ())


class QueueWorkers:
    """A `LoadWorkers` that submits a transfer to a queue for each load.

    A transfer runs the load that is most urgent when the transfer starts.
    """

    def __init__(self, queue: TransferQueue, name: str = "") -> None:
        """Submit transfers to `queue`, each on the link whose number is the load's lane.

        The caller closes the queue, after these workers.

        `name` is the name of the transfers in traces; if it is empty, they have the titles of their loads.
        """
        self._queue, self._name = queue, name
        self._asked = deque[QueuedTransfer]()  # transfers that may not have ended, in order
        self._turn: QueuedTransfer | None = None  # the last transfer of a load with `in_turn`

    def start(self, serve: Serve) -> None:
        """Set `serve` as the function that each transfer calls."""
        self._serve = serve

    def kick(self, loads: Sequence[Load | None]) -> None:
        """Submit a transfer for each of `loads`; raise TpiError if the queue is closed."""
        while self._asked and self._asked[0].done and not self._asked[0].error:
            self._asked.popleft()
        for load in loads:
            self._submit(load or _SPARE)

    @property
    def lost(self) -> bool:
        """True if the last transfer failed, as it does when the queue is closed."""
        return bool(self._asked and self._asked[-1].done and self._asked[-1].error)

    def close(self) -> None:
        """Wait for the submitted transfers to end. Further calls do nothing."""
        for ticket in list(self._asked):
            ticket.join()

    def _submit(self, load: Load) -> None:
        name, link = self._name or load.title, load.lane
        serve, behind = partial(self._serve, load.lane), self._turn if load.in_turn else None
        made = self._queue.submit("weight load", name, serve, link=link, behind=behind)
        self._asked.append(made)
        if load.in_turn:
            self._turn = made
