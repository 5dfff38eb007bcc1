"""How much of the model each node is to hold, whoever is there, and who would only slow the others."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from master.deployment.planner import Split
from master.workers.places import WorkerId, recognise
from tpi.keys.door import leaves_machine
from tpi.net.sockets import split_address


class Sharing(Protocol):
    """How much each node is to hold, whoever is there."""

    def among(self, workers: Sequence[WorkerId]) -> Sequence[float] | Split:
        """The shares of the master and of these workers."""
        ...

    def refused(self, workers: Sequence[WorkerId]) -> Mapping[WorkerId, str]:
        """Who of these would slow the rest, and why in words."""
        ...


@dataclass(frozen=True)
class Shares:
    """What the user asked for: the master's share, and each worker's, wherever it is. Others get the workers' mean."""

    master: float
    workers: Mapping[WorkerId, float]

    @classmethod
    def of(cls, shares: Sequence[float], workers: Sequence[WorkerId]) -> "Shares":
        """Shares of the master and of these workers, in that order."""
        return cls(shares[0], dict(zip(workers, shares[1:], strict=True)))

    def among(self, workers: Sequence[WorkerId]) -> list[float]:
        """The shares of the master and of these; equal ones where nobody who is left had any."""
        asked = list(self.workers.values())
        given = [share for share in asked if share > 0]
        mean = sum(given) / len(given) if given else self.master
        known = recognise(workers, list(self.workers))
        found = [self.master, *(mean if number is None else asked[number] for number in known)]
        return found if any(found) else [1.0] * len(found)

    def refused(self, workers: Sequence[WorkerId]) -> Mapping[WorkerId, str]:
        """Nobody: who takes part was not left to a plan."""
        return {}


@dataclass(frozen=True)
class SharesLater:
    """The shares of a master that begins alone: planned once somebody joins from another machine.

    `plan` is called then, since planning needs what takes time to import and to measure.
    """

    plan: Callable[[], Sharing]

    @cached_property
    def _planned(self) -> Sharing:
        return self.plan()

    def among(self, workers: Sequence[WorkerId]) -> Sequence[float] | Split:
        """All for the master alone; planned shares among other machines, equal ones among processes of this one."""
        return self._planned.among(workers) if _elsewhere(workers) else [1.0] * (1 + len(workers))

    def refused(self, workers: Sequence[WorkerId]) -> Mapping[WorkerId, str]:
        """Whom the plan leaves out; nobody on this machine."""
        return self._planned.refused(workers) if _elsewhere(workers) else {}


def _elsewhere(workers: Sequence[WorkerId]) -> bool:
    return bool(workers) and all(leaves_machine(split_address(one.address)[0]) for one in workers)
