"""Which worker is which: who comes back is known by its key, wherever it is, and on this machine by its address."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Protocol, TypeVar


@dataclass(frozen=True)
class WorkerId:
    """Where a worker is, and the key that it has proved to own: empty on this machine, or if that is not known yet."""

    address: str
    key: bytes = b""

    def stays(self, other: "WorkerId") -> bool:
        """Whether they may be one that has not moved."""
        return self.address == other.address and (self.key == other.key or not self.key or not other.key)

    def moved(self, other: "WorkerId") -> bool:
        """Whether they may be one at another address."""
        return bool(self.key) and self.key == other.key


def recognise(present: Sequence[WorkerId], known: Sequence[WorkerId]) -> list[int | None]:
    """Which of `known` each of `present` is, None for somebody new; no two are the same.

    Who is where it was comes first: one machine may run several workers under its one key.
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


class WorkerPlaces:
    """The order of a run's workers, in which they get their units: who comes back gets the same, which it has."""

    def __init__(self) -> None:
        self.known: list[WorkerId] = []
        self._links: dict[str, int] = {}

    def ordered(self, workers: Iterable[Worker]) -> list[Worker]:
        """The same, in their places; who is new comes last."""
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
        """The number of the line to `address`, which no other of those that are `called` has."""
        self._links = {one: number for one, number in self._links.items() if one in called}
        taken = set(self._links.values())
        return self._links.setdefault(address, next(number for number in count() if number not in taken))
