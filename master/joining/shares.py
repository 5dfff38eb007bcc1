"""How much of the model each node is to hold, whoever is there."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from master.deployment.planner import Split
from master.workers.places import WorkerId, recognise


class Sharing(Protocol):
    """How much each node is to hold, whoever is there."""

    def among(self, workers: Sequence[WorkerId]) -> Sequence[float] | Split:
        """The shares of the master and of these workers."""
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
