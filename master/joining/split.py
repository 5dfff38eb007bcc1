"""Who is to hold what where the user does not say: the fastest split over machines that differ, some left out."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from master.deployment.deploy import own_memory, own_threads
from master.deployment.planner import Split
from master.options import RunOptions
from master.planning.home.asked import Neighbour, ask_neighbours, home_of_neighbours
from master.planning.home.dealing import HomeModel
from master.planning.node import NodeFlags, planned_node
from master.planning.problem import request_of
from master.planning.shapes import ModelShape, model_shape
from master.workers.places import WorkerId, recognise
from scheduler.model.home.problem import Dealing, HomeProblem
from scheduler.model.home.solve import best_split, split_over
from scheduler.model.machine import NodeMachine
from tpi.errors import NodeError, PlanError
from tpi.keys.door import Door
from tpi.net.sockets import Net
from tpi.progress import phase, warn


@dataclass(frozen=True)
class PlannedSplit:
    """A split by measured speeds and links. A `master.joining.shares.Sharing`: planned anew over those who are left."""

    shape: ModelShape
    own: NodeMachine
    neighbours: list[Neighbour]  # those left out too; who joins later is added
    addresses: tuple[str, ...]  # of the workers that take part
    options: RunOptions
    measure: Callable[[Sequence[str]], list[Neighbour]]  # workers at addresses; nobody where one does not answer

    @property
    def left_out(self) -> tuple[WorkerId, ...]:
        """Who was measured, and does not take part."""
        return tuple(one.id for one in self.neighbours if one.address not in self.addresses)

    def among(self, workers: Sequence[WorkerId]) -> Sequence[float] | Split:
        """The best split over exactly these; equal shares where one of them cannot be measured, or nothing fits."""
        equal = [1.0] * (1 + len(workers))
        known = self._known(workers)
        if not known:
            return equal
        found = split_over(self.problem(known), tuple(range(1 + len(known))))
        return equal if found is None else _shares(found, 1 + len(known))

    def _known(self, workers: Sequence[WorkerId]) -> list[Neighbour]:
        """How fast these are, those who joined since the last plan measured by now; nobody where one is not known."""
        known = recognise(workers, [one.id for one in self.neighbours])
        new = [one.address for one, number in zip(workers, known, strict=True) if number is None]
        if new:
            self.neighbours.extend(self.measure(new))
            known = recognise(workers, [one.id for one in self.neighbours])
        found = [self.neighbours[number] for number in known if number is not None]
        return found if len(found) == len(workers) else []

    def problem(self, neighbours: Sequence[Neighbour]) -> HomeProblem:
        """Of this machine and these."""
        request = request_of(self.shape.config, None, None, 1, self.options.context)
        home = home_of_neighbours(self.own, neighbours)
        return HomeModel(self.shape, home, request, self.options.kv_dtype).problem


def plan_split(options: RunOptions, door: Door) -> PlannedSplit | None:
    """Measure and plan, and say who is left out; None where one does not answer, or does not say how fast it is.

    Such workers are met as if nothing had been planned.
    """
    with phase("asking the workers how fast they are"):
        neighbours = _asked(options.workers, door)
    if not neighbours:
        return None
    known = sorted((options.cache / "packs").glob("*/*.safetensors"))
    flags = NodeFlags(memory=own_memory(options), threads=own_threads(options))
    own = planned_node(flags, options.cache, known).machine
    shape = model_shape(options.model, options.dtype, options.cache, own.memory + sum(_memories(neighbours)))
    everyone = PlannedSplit(shape, own, neighbours, options.workers, options, partial(_asked, door=door))
    try:
        dealing = best_split(everyone.problem(neighbours))
    except PlanError:  # said again, by whom, where weights are assigned
        return None
    _say(everyone.problem(neighbours), dealing)
    return replace(everyone, addresses=tuple(neighbours[rank - 1].address for rank in dealing.members if rank))


def _asked(addresses: Sequence[str], door: Door) -> list[Neighbour]:
    net = Net(door=door)
    try:
        return ask_neighbours(net, addresses)
    except NodeError:
        return []
    finally:
        net.close()


def _memories(neighbours: Sequence[Neighbour]) -> list[int]:
    return [one.machine.memory for one in neighbours]


def _shares(found: Dealing, nodes: int) -> Split:
    """Shares of every kind, in whole units; a kind that the model lacks is dealt to nobody."""
    none = (1.0,) * nodes
    kinds = (tuple(map(float, found.units.get(kind, ()))) or none for kind in ("heads", "neurons", "experts", "shared"))
    return Split(*kinds)


def _say(problem: HomeProblem, dealing: Dealing) -> None:
    out = [node.name for rank, node in enumerate(problem.nodes) if rank not in dealing.members]
    if out:
        everybody = split_over(problem, tuple(range(len(problem.nodes))))
        slower = f" ({1 / everybody.seconds:.3g} with all)" if everybody else ""
        warn(
            f"{1 / dealing.seconds:.3g} tok/s expected without {', '.join(out)}{slower}: left out; "
            "--split equal uses every node"
        )
