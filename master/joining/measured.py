"""How fast workers are, and how far away: as they were last measured."""

from collections.abc import Callable, Sequence
from threading import Event, Lock
from typing import TYPE_CHECKING, Protocol

from master.workers.places import WorkerId, recognise
from tpi.errors import NodeError, TpiError
from tpi.progress import warn

if TYPE_CHECKING:
    from master.planning.home.asked import Neighbour

_BETTER = 1.5  # times as fast, as near or as large: what is measured again is never quite the same


class Ask(Protocol):
    """Measures the workers at some addresses; it ends early once nobody has `wanted` that any more."""

    def __call__(self, addresses: Sequence[str], wanted: Callable[[], bool]) -> "list[Neighbour]":
        """Takes up to ten seconds; each worker has some hundred kilobytes to echo.

        Raises:
            TpiError: if one of them cannot be measured, whom a NodeError names.
        """
        ...


class MeasuredWorkers:
    """What is known of workers. All methods are for any thread; those that measure wait for the network."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self._known: list[Neighbour] = []  # each worker once, where it was last measured
        self._at: dict[WorkerId, Neighbour] = {}  # each place of a worker
        self._told: set[str] = set()  # addresses of those who were said to be past measuring
        self._lock = Lock()
        self._over = Event()

    def ask(self, addresses: Sequence[str]) -> "list[Neighbour]":
        """Measure who is at these addresses now: all of them, or nobody, and a word, if one cannot be measured."""
        try:
            found = self._ask(addresses, lambda: not self._over.is_set())
        except TpiError as error:
            self._say(error)
            return []
        for one in found:
            self._remember(one)
        return found

    def missing(self, workers: Sequence[WorkerId]) -> list[str]:
        """The addresses of those who never were measured."""
        return [one.address for one, found in zip(workers, self._find(workers), strict=True) if found is None]

    def known(self, workers: Sequence[WorkerId]) -> "list[Neighbour]":
        """What is known of these; nobody, where one of them never was measured."""
        found = [one for one in self._find(workers) if one is not None]
        return found if len(found) == len(workers) else []

    def improved(self, worker: WorkerId) -> bool:
        """Whether it, or the link to it, is better by now than when it was last measured there; that is not changed."""
        before = self._at.get(worker)
        try:
            found = self._ask([worker.address], lambda: not self._over.is_set())
        except TpiError:  # it is away
            return False
        return any(one.key == worker.key and (before is None or _better(one, before)) for one in found)

    def close(self) -> None:
        """Whatever is being measured ends early, with nothing found."""
        self._over.set()

    def _say(self, error: TpiError) -> None:
        """Say, once, who cannot be measured and why, unless that is because nobody waits for it any more."""
        who = error.node if isinstance(error, NodeError) else ""
        if not self._over.is_set() and who not in self._told:
            self._told.add(who)
            warn(f"{error}; until it can be measured all get equal shares; --split says otherwise")

    def _find(self, workers: Sequence[WorkerId]) -> "list[Neighbour | None]":
        with self._lock:
            numbers = recognise(workers, [one.id for one in self._known])
            return [None if number is None else self._known[number] for number in numbers]

    def _remember(self, found: "Neighbour") -> None:
        with self._lock:
            self._at[found.id] = found
            (number,) = recognise([found.id], [one.id for one in self._known])
            if number is None:
                self._known.append(found)
            else:
                self._known[number] = found


def _better(now: "Neighbour", before: "Neighbour") -> bool:
    """Whether anything that a plan asks for is better, by more than noise."""
    return (
        now.link.latency_s * _BETTER < before.link.latency_s
        or now.link.bytes_per_s > _BETTER * before.link.bytes_per_s
        or now.machine.host.read > _BETTER * before.machine.host.read
        or now.machine.memory > _BETTER * before.machine.memory
    )
