"""The seconds of a stage of given nodes between any two cuts of the model, all at once."""

from collections.abc import Sequence
from functools import cached_property
from math import inf

import numpy as np
import numpy.typing as npt

from scheduler.model.home.problem import HomeNode, Members
from scheduler.model.home.solve import proportional
from scheduler.model.home.stages import MASTER, StageProblem

F64 = npt.NDArray[np.float64]
_TRIES = 4  # steps of Newton's method; it is exact after as many as there are nodes whose memory is full


class StageCosts:
    """The seconds that given nodes take for a stage, for all stages between two cuts at once.

    A cut is a layer at which a stage may begin or end. All arrays are `[cuts, cuts]`: the element `[a, b]` is for the
    layers from cut a to cut b. Seconds are infinite if the nodes cannot hold the keys and values of these layers.
    """

    def __init__(self, problem: StageProblem, cuts: Sequence[int], even: float) -> None:
        """Prepare the costs of stages between `cuts`, layers in ascending order.

        Each stage's seconds are multiplied by a factor from 1, for the shortest stage, to 1 + `even`, for the longest
        one. So a search prefers stages of equal length.
        """
        self.problem, self.cuts, self.even = problem, np.array(cuts), even
        self._longest = self._of_all("read")[0, -1] / max(node.read for node in problem.nodes)
        self._ordered = self.cuts[:, None] < self.cuts

    def of(self, members: Members) -> F64:
        """Return the seconds of a stage on the nodes `members`; an estimate if its weights exceed their memories."""
        nodes = [self.problem.nodes[rank] for rank in members]
        speeds = np.array([node.read for node in nodes])
        turn = self.problem.nodes[MASTER].turn if MASTER in members else 0.0
        whole, kept = self._table("everywhere"), self._of_all("kv_bytes")
        rooms = np.array([np.maximum(0.0, node.memory - node.fixed - whole) for node in nodes])
        outside = whole / speeds.min() + turn + self._table("sums") * self.problem.exchange(members, 1)
        seconds = self._seconds(nodes, rooms, outside)
        seconds = np.where(self._ordered, seconds, 0.0)
        found: F64 = seconds * (1 + self.even * seconds / (seconds + self._longest))
        found[(kept > rooms.sum(axis=0)) | ~self._ordered] = inf
        return found

    def _seconds(self, nodes: Sequence[HomeNode], rooms: F64, outside: F64) -> F64:
        """Return the seconds of a stage that `nodes` divide by their speeds, or as `_balanced` does if that is faster.

        Args:
            nodes: the nodes of the stage.
            rooms: each node's bytes for weights, keys and values, `[nodes, cuts, cuts]`.
            outside: seconds of the stage that are not divided, such as sums.
        """
        speeds, held = [node.read for node in nodes], self._held
        compute = np.zeros_like(outside)
        for name, units in self._kinds.items():
            slowest = max(count / speed for count, speed in zip(proportional(units, speeds), speeds, strict=True))
            compute = compute + slowest * self._table("read", name)
        parts = np.array(speeds)[:, None, None] / sum(speeds)
        seconds = self._with_disks(nodes, rooms, parts, compute + outside)
        if len(nodes) > 1 and np.any(parts * held > rooms):
            parts = self._balanced(nodes, rooms, outside)
            slowed = (parts / np.array(speeds)[:, None, None]).max(axis=0) * self._of_all("read")
            seconds = np.minimum(seconds, self._with_disks(nodes, rooms, parts, slowed + outside))
        return seconds

    def _balanced(self, nodes: Sequence[HomeNode], rooms: F64, outside: F64) -> F64:
        """Return the part of a stage that each node should get for the shortest time of a token, `[nodes, cuts, cuts]`.

        In t seconds, a node can compute the part `(t - outside) speed / read` of the stage. Its memory and its disk
        give it the part `(room + t disk) / held` of the weights. The node's part is the smaller of the two. Newton's
        method finds the least t for which the parts of all nodes add up to 1. As the sum of all parts is a concave
        function of t, Newton's method never goes beyond that t.
        """
        read, held = np.maximum(self._of_all("read"), 1.0), np.maximum(self._held, 1.0)
        computed = np.array([node.read for node in nodes])[:, None, None] / read
        least = self._least_from_disk
        loaded = np.array([node.disk / least for node in nodes])[:, None, None] / held
        seconds = outside
        for _ in range(_TRIES + 1):
            able, had = (seconds - outside) * computed, rooms / held + seconds * loaded
            parts = np.minimum(able, had)
            slope = np.where(able < had, computed, loaded).sum(axis=0)
            seconds = seconds + np.maximum(0.0, 1.0 - parts.sum(axis=0)) / slope
        found: F64 = parts / np.maximum(parts.sum(axis=0), 1e-9)
        return found

    def _with_disks(self, nodes: Sequence[HomeNode], rooms: F64, parts: F64, busy: F64) -> F64:
        """Return the seconds of a stage: `busy`, or the reading time of the slowest disk if that is longer.

        Each node holds its share of the stage in `parts`. What exceeds its bytes in `rooms`, it reads from its disk.
        """
        longest, order = busy, sorted(self._kinds, key=self._read_from_disk)
        for node, room, part in zip(nodes, rooms, parts, strict=True):
            read, excess = np.zeros_like(busy), np.maximum(0.0, part * self._held - room)
            if not excess.any():
                continue
            for name in order:
                outside = np.minimum(excess, part * self._kinds[name] * self._table("nbytes", name))
                read, excess = read + outside * self._read_from_disk(name), excess - outside
            longest = np.maximum(longest, read / node.disk)
        return longest

    @cached_property
    def _kinds(self) -> dict[str, int]:
        return {kind.kind: kind.units for layer in self.problem.layers for kind in layer.kinds}

    @cached_property
    def _held(self) -> F64:
        """Bytes of weights, keys and values in the layers from each cut to each other cut."""
        held: F64 = self._of_all("nbytes") + self._of_all("kv_bytes")
        return held

    @cached_property
    def _from_disk(self) -> dict[str, float]:
        return {kind.kind: kind.read_from_disk for layer in self.problem.layers for kind in layer.kinds}

    def _read_from_disk(self, name: str) -> float:
        return self._from_disk[name]

    @cached_property
    def _least_from_disk(self) -> float:
        """Smallest share of weights on disk that a token reads, over all kinds of units."""
        return max(1e-3, min(self._from_disk.values()))

    def _of_all(self, what: str) -> F64:
        """Return the sum of a number of `UnitKind`, the attribute `what`, over all units of the layers between any two
        cuts.
        """
        if (what, "all") not in self._tables:
            parts = [units * self._table(what, name) for name, units in self._kinds.items()]
            self._tables[what, "all"] = np.sum(parts, axis=0)
        return self._tables[what, "all"]

    def _table(self, what: str, name: str = "") -> F64:
        """Return the sum of a number over the layers between any two cuts, `[cuts, cuts]`.

        The number is the attribute `what` of one unit of the kind `name` or, without a name, of the layer
        (`LayerWork`).
        """
        if (what, name) not in self._tables:
            layers = self.problem.layers
            numbers = [
                sum(getattr(kind, what) for kind in layer.kinds if kind.kind == name) if name else getattr(layer, what)
                for layer in layers
            ]
            until = np.concatenate([[0.0], np.cumsum(numbers)])[self.cuts]
            self._tables[what, name] = until - until[:, None]
        return self._tables[what, name]

    @cached_property
    def _tables(self) -> dict[tuple[str, str], F64]:
        return {}
