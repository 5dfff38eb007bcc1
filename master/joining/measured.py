"""The last measured speeds of workers and of the links to them."""

from collections.abc import Callable, Sequence
from threading import Event, Lock
from typing import TYPE_CHECKING, Protocol

from master.workers.places import WorkerId, recognise
from tpi.errors import NodeError, TpiError
from tpi.progress import warn

if TYPE_CHECKING:
    from master.planning.home.asked import Neighbour

_BETTER = 1.5  # factor by which a new measurement must be better to count as an improvement rather than noise


class Ask(Protocol):
    """A function that measures the workers at some addresses. It ends early when `wanted` returns False."""

    def __call__(self, addresses: Sequence[str], wanted: Callable[[], bool]) -> "list[Neighbour]":
        """Measure the workers. This takes up to ten seconds, and each worker echoes some hundred kilobytes.

        Raises:
            TpiError: if a worker cannot be measured; a NodeError names it.
        """
        ...


class MeasuredWorkers:
    """The measured speeds of workers and of the links to them, and the methods that measure.

    All methods may be called from any thread; `ask` and `improved` block during a measurement.
    """

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self._known: list[Neighbour] = []  # each worker once, at the address where it was last measured
        self._at: dict[WorkerId, Neighbour] = {}  # each worker at each of its addresses
        self._told: set[str] = set()  # addresses of workers whose failed measurement was reported
        self._held: TpiError | None = None  # a failed measurement that `warn_of_failure` will report
        self._lock = Lock()
        self._over = Event()

    def ask(self, addresses: Sequence[str]) -> "list[Neighbour]":
        """Measure the workers at `addresses`. If any cannot be measured, print a warning and return no worker."""
        try:
            found = self._ask(addresses, lambda: not self._over.is_set())
        except TpiError as error:
            self._say(error)
            return []
        self._remember(found)
        return found

    def ask_first(self, addresses: Sequence[str]) -> "list[Neighbour]":
        """Measure the workers at `addresses` before they are connected, as `ask` does, but print no warning.

        A worker that cannot be reached ends the run with an error of its own. If all workers are connected later,
        `warn_of_failure` prints the warning.
        """
        try:
            found = self._ask(addresses, lambda: not self._over.is_set())
        except TpiError as error:
            self._held = error
            return []
        self._remember(found)
        return found

    def warn_of_failure(self) -> None:
        """Print the warning that `ask_first` has not printed, if there is one."""
        if self._held is not None:
            self._say(self._held)
        self._held = None

    def missing(self, workers: Sequence[WorkerId]) -> list[str]:
        """Return the addresses of those of `workers` that were never measured."""
        return [one.address for one, found in zip(workers, self._find(workers), strict=True) if found is None]

    def known(self, workers: Sequence[WorkerId]) -> "list[Neighbour]":
        """Return the measurements of `workers`; empty if any of them was never measured."""
        found = [one for one in self._find(workers) if one is not None]
        return found if len(found) == len(workers) else []

    def improved(self, worker: WorkerId) -> bool:
        """Measure again; return True if the worker or its link is better than at the last measurement at this address.

        The recorded measurement is not changed.
        """
        before = self._at.get(worker)
        try:
            found = self._ask([worker.address], lambda: not self._over.is_set())
        except TpiError:  # the worker cannot be measured now
            return False
        return any(one.key == worker.key and (before is None or _better(one, before)) for one in found)

    def close(self) -> None:
        """Abort the measurements in progress, which then return no workers."""
        self._over.set()

    def _say(self, error: TpiError) -> None:
        """Print a warning that a worker cannot be measured, once for each worker; print none after `close`."""
        who = error.node if isinstance(error, NodeError) else ""
        if not self._over.is_set() and who not in self._told:
            self._told.add(who)
            warn(f"{error}; until it can be measured, all nodes get equal shares; use --split to set other shares")

    def _find(self, workers: Sequence[WorkerId]) -> "list[Neighbour | None]":
        with self._lock:
            numbers = recognise(workers, [one.id for one in self._known])
            return [None if number is None else self._known[number] for number in numbers]

    def _remember(self, found: "Sequence[Neighbour]") -> None:
        """Store measurements of workers; several workers of one machine may have the same key."""
        with self._lock:
            numbers = recognise([one.id for one in found], [one.id for one in self._known])
            for one, number in zip(found, numbers, strict=True):
                self._at[one.id] = one
                if number is None:
                    self._known.append(one)
                else:
                    self._known[number] = one


def _better(now: "Neighbour", before: "Neighbour") -> bool:
    """Return True if any figure of `now` that a plan uses is better than in `before` by more than noise."""
    return (
        now.link.latency_s * _BETTER < before.link.latency_s
        or now.link.bytes_per_s > _BETTER * before.link.bytes_per_s
        or now.machine.host.read > _BETTER * before.machine.host.read
        or now.machine.memory > _BETTER * before.machine.memory
    )
