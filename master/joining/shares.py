"""Rules for each node's share of the model, given the present workers, and for workers to leave out."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

from master.deployment.planner import Split
from master.workers.cluster import Cluster
from master.workers.places import WorkerId, recognise
from tpi.keys.policy import leaves_machine
from tpi.net.sockets import split_address

if TYPE_CHECKING:
    from master.planning.home.compared import ComparedLayouts


class Sharing(Protocol):
    """A rule for the nodes' shares, given the present workers."""

    def among(self, workers: Sequence[WorkerId]) -> Sequence[float] | Split:
        """Return the shares of the master and of `workers`, or a split by kinds of units."""
        ...

    def meet(self, cluster: Cluster) -> None:
        """Measure the links between workers, if some workers of `cluster` are new. Called between two steps."""
        ...

    def refused(self, workers: Sequence[WorkerId]) -> Mapping[WorkerId, str]:
        """Return those of `workers` that would slow the others, each with the reason as a phrase."""
        ...

    def compared(self, workers: Sequence[WorkerId]) -> "ComparedLayouts | None":
        """Return the layouts that were compared for `workers`; None if the user chose the layout."""
        ...

    def judge(self, workers: Sequence[WorkerId], seconds: float) -> None:
        """Compare the forecast for the layout over `workers` with the measured `seconds` of a step with one token.

        If they differ much, have the links measured again before the next plan.
        """
        ...


@dataclass(frozen=True)
class Shares:
    """The shares of the master and of each worker, as the user gave them.

    A worker without a given share gets the mean of the workers' shares.
    """

    master: float
    workers: Mapping[WorkerId, float]

    @classmethod
    def of(cls, shares: Sequence[float], workers: Sequence[WorkerId]) -> "Shares":
        """Return a rule that gives `shares` to the master and to `workers`, in this order."""
        return cls(shares[0], dict(zip(workers, shares[1:], strict=True)))

    def among(self, workers: Sequence[WorkerId]) -> list[float]:
        """Return the shares of the master and of `workers`; equal shares if all would be 0."""
        asked = list(self.workers.values())
        given = [share for share in asked if share > 0]
        mean = sum(given) / len(given) if given else self.master
        known = recognise(workers, list(self.workers))
        found = [self.master, *(mean if number is None else asked[number] for number in known)]
        return found if any(found) else [1.0] * len(found)

    def meet(self, cluster: Cluster) -> None:
        """Do nothing, because given shares need no measurement."""

    def refused(self, workers: Sequence[WorkerId]) -> Mapping[WorkerId, str]:
        """Return no worker, because the user chose the workers that take part."""
        return {}

    def compared(self, workers: Sequence[WorkerId]) -> "ComparedLayouts | None":
        """Return None, because the user chose the shares."""
        return None

    def judge(self, workers: Sequence[WorkerId], seconds: float) -> None:
        """Do nothing, because there is no forecast."""


@dataclass(frozen=True)
class SharesLater:
    """The shares of a master that begins alone: they are planned when a worker joins from another machine.

    `plan` is called only then, because importing the planner and measuring take time.
    """

    plan: Callable[[], Sharing]

    @cached_property
    def _planned(self) -> Sharing:
        return self.plan()

    def among(self, workers: Sequence[WorkerId]) -> Sequence[float] | Split:
        """Return the planned shares if there are workers and all are on other machines, else equal shares."""
        return self._planned.among(workers) if _elsewhere(workers) else [1.0] * (1 + len(workers))

    def meet(self, cluster: Cluster) -> None:
        """Measure the unknown links between the workers, if all are on other machines."""
        if _elsewhere([worker.id for worker in cluster.workers]):
            self._planned.meet(cluster)

    def refused(self, workers: Sequence[WorkerId]) -> Mapping[WorkerId, str]:
        """Return the workers that the plan leaves out; workers on this machine are never left out."""
        return self._planned.refused(workers) if _elsewhere(workers) else {}

    def compared(self, workers: Sequence[WorkerId]) -> "ComparedLayouts | None":
        """Return the layouts that were compared; None if there are no workers, or some are on this machine."""
        return self._planned.compared(workers) if _elsewhere(workers) else None

    def judge(self, workers: Sequence[WorkerId], seconds: float) -> None:
        """Compare the forecast with the measured `seconds` of a step, if all workers are on other machines."""
        if _elsewhere(workers):
            self._planned.judge(workers, seconds)


def _elsewhere(workers: Sequence[WorkerId]) -> bool:
    return bool(workers) and all(leaves_machine(split_address(one.address)[0]) for one in workers)
