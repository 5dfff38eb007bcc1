"""How much of the model each node is to hold, whoever is there."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from master.deployment.planner import Split


class Sharing(Protocol):
    """How much each node is to hold, whoever is there."""

    def among(self, addresses: Sequence[str]) -> Sequence[float] | Split:
        """The shares of the master and of the workers at `addresses`."""
        ...


@dataclass(frozen=True)
class Shares:
    """What the user asked for: the master's share, and each worker's by its address. Others get the workers' mean."""

    master: float
    workers: Mapping[str, float]

    @classmethod
    def of(cls, shares: Sequence[float], addresses: Sequence[str]) -> "Shares":
        """Shares of the master and of the workers at `addresses`, in that order."""
        return cls(shares[0], dict(zip(addresses, shares[1:], strict=True)))

    def among(self, addresses: Sequence[str]) -> list[float]:
        """The shares of the master and of those at `addresses`; equal ones where nobody who is left had any."""
        given = [share for share in self.workers.values() if share > 0]
        mean = sum(given) / len(given) if given else self.master
        found = [self.master, *(self.workers.get(address, mean) for address in addresses)]
        return found if any(found) else [1.0] * len(found)
