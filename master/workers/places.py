"""The identity of workers. A returning worker is recognised by its key, or on this machine by its address."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Protocol, TypeVar


@dataclass(frozen=True)
class WorkerId:
    """A worker's address and its proven key. The key is empty on this machine, and until it is known."""

    address: str
    key: bytes = b""

    def stays(self, other: "WorkerId") -> bool:
        """Return True if both ids may be the same worker at the same address."""
        return self.address == other.address and (self.key == other.key or not self.key or not other.key)

    def moved(self, other: "WorkerId") -> bool:
        """Return True if both ids may be the same worker at different addresses."""
        return bool(self.key) and self.key == other.key


def recognise(present: Sequence[WorkerId], known: Sequence[WorkerId]) -> list[int | None]:
    """Return, for each of `present`, its index in `known`, or None for a new worker. No index occurs twice.

    Equal addresses are matched first: one machine may run several workers with the same key.
    """
    found: list[int | None] = [None] * len(present)
    for same in (WorkerId.stays, WorkerId.moved):
        for number, one in enumerate(present):
            if found[number] is None:
                others = (index for index, other in enumerate(known) if index not in found and same(one, other))
                found[number] = next(others, None)
    return found


class _Identified(Protocol):
    @property
    def id(self) -> WorkerId: ...


Worker = TypeVar("Worker", bound=_Identified)


class WorkerOrder:
    """The order in which a run's workers get their units. A worker that returns gets the units that it has."""

    def __init__(self) -> None:
        self.known: list[WorkerId] = []
        self._links: dict[str, int] = {}

    def ordered(self, workers: Iterable[Worker]) -> list[Worker]:
        """Return the workers in the order of earlier calls; new workers come last."""
        each = list(workers)
        numbers = recognise([one.id for one in each], self.known)
        for index, one in enumerate(each):
            number = numbers[index]
            if number is None:
                numbers[index] = len(self.known)
                self.known.append(one.id)
            else:
                self.known[number] = one.id
        return [one for _, one in sorted(zip(numbers, each, strict=True), key=lambda pair: pair[0] or 0)]

    def link(self, address: str, called: Collection[str]) -> int:
        """Return the number of the connection to `address`, different from those of all other addresses in `called`."""
        self._links = {one: number for one, number in self._links.items() if one in called}
        taken = set(self._links.values())
        return self._links.setdefault(address, next(number for number in count() if number not in taken))
