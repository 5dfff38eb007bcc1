"""The problem of splitting a model over a home: bytes of each kind of unit, the master's tables, the cost of sums."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from allreduce.predict import PREDICTIONS, predict
from master.planning.home.members import Home
from master.planning.problem import block_bytes, default_kv, planning_problem
from master.planning.shapes import ModelShape
from scheduler.model.home.problem import HomeNode, HomeProblem, Members, UnitKind
from scheduler.model.offload.problem import Problem
from scheduler.model.offload.work import Workload
from tpi.block import joining
from tpi.config import RECURRENT
from tpi.kernels.kv import KvDtype, vector_bytes
from tpi.pack.blockfile import BlockShape
from tpi.pack.layout import WHOLE_RUNS, RunLayout
from tpi.partition import FFN_UNIT
from tpi.topology.links import LinkTable


@dataclass(frozen=True)
class HomeModel:
    """A model that is to be split over a home, for one kind of request."""

    shape: ModelShape
    home: Home
    request: Workload
    kv_dtype: KvDtype | None = None

    @property
    def wire(self) -> str:
        """The format in which partial sums travel, as `master.deployment.deploy.wire` chooses it."""
        return "f32" if default_kv(self.shape) == "f32" else "bf16"

    @property
    def sums(self) -> int:
        """Number of allreduces of a step: one for each block that does not share it with the next one."""
        return sum(not joining(self.shape.config, block.kind) for block in self.shape.blocks)

    @cached_property
    def whole(self) -> Problem:
        """The problem of the whole model on the master alone. What a node needs besides units is equal on every
        node.
        """
        return planning_problem(self.shape, self.home.machines[0], self.request, None, self.kv_dtype)

    @cached_property
    def problem(self) -> HomeProblem:
        """The problem that `scheduler.model.home.solve.best_split` solves."""
        return HomeProblem(
            tuple(self._node(rank) for rank in range(len(self.home.names))),
            tuple(self._dealt()),
            lambda members: self.sums * self.exchange(members, 1)[0],
        )

    def exchange(self, members: Members, tokens: int) -> tuple[float, str]:
        """Return the seconds of one allreduce of `tokens` tokens' partial results, and the fastest algorithm."""
        links, values = among(self.home.links, members), tokens * self.shape.config.hidden
        if links.size == 1:
            return 0.0, "loopback"
        return min((predict(name, links, values, self.wire), name) for name in PREDICTIONS)

    def items(self, kind: str) -> tuple[int, int]:
        """Return how many heads or neurons a unit of `kind` has, and their total; the last unit may have fewer."""
        config, mixture = self.shape.config, self.shape.config.mixture
        if kind == "heads":
            units = next(each.units for each in self.problem.kinds if each.kind == kind)
            return -(-config.heads // units), config.heads
        neurons = {"experts": mixture.width, "shared": mixture.shared} if mixture else {}
        return FFN_UNIT, neurons.get(kind, config.intermediate)

    @cached_property
    def everywhere(self) -> int:
        """Bytes of weights that every node has in full and reads for every token: latent runs, used by all heads."""
        runs = (run for block in self.shape.blocks for run in block.runs)
        return sum(run.units * run.unit_bytes for run in runs if run.name in WHOLE_RUNS)

    def _node(self, rank: int) -> HomeNode:
        machine, needs = self.home.machines[rank], self.whole.needs
        tables = 0 if rank else block_bytes(self.shape.head)
        fixed = needs.fixed + self.whole.chunk * needs.token + tables + self.everywhere
        # the workers read their copies at the same time as the master
        turn = 0.0 if rank else (tables + self.everywhere) / machine.host.read
        return HomeNode(self.home.names[rank], machine.host.read, machine.disk.read, machine.memory, fixed, turn)

    def _dealt(self) -> Iterator[UnitKind]:
        config, blocks = self.shape.config, self.shape.blocks
        if heads := [block for block in blocks if block.kind == "attention"]:
            kv_dtype = self.kv_dtype or default_kv(self.shape)
            layers = [config.at_layer(layer) for layer in config.attention_layers if config.kv_layer(layer) == layer]
            # bytes of keys and values, all layers
            token = sum(2 * vector_bytes(layer.head_dim, kv_dtype) * layer.kv_heads for layer in layers)
            recurrent = [block for block in blocks if block.kind in RECURRENT]  # dealt by the same shares
            units = _run(heads[0], "query").units
            nbytes = sum(map(block_bytes, [*heads, *recurrent])) - self.everywhere
            attended = self.request.prompt + self.request.answer / 2
            yield UnitKind(
                "heads", units, len(heads), nbytes / units, (nbytes + token * attended) / units,
                token * self.request.context / units,
            )  # fmt: skip
        if dense := [block for block in blocks if block.kind == "ffn"]:
            units, nbytes = _run(dense[0], "neuron").units, sum(map(block_bytes, dense))
            yield UnitKind("neurons", units, len(dense), nbytes / units, nbytes / units)
        if mixed := [block for block in blocks if block.kind == "experts"]:
            yield from self._experts(mixed)

    def _experts(self, blocks: list[BlockShape]) -> Iterator[UnitKind]:
        """Yield the shared experts, and slices of every routed expert, of which a token reads only those it chooses."""
        mixture = self.shape.config.mixture
        assert mixture is not None
        run = _run(blocks[0], "neuron")
        slices = run.units // mixture.experts
        nbytes = len(blocks) * run.unit_bytes * mixture.experts
        yield UnitKind("experts", slices, len(blocks), nbytes, nbytes * mixture.used / mixture.experts)
        for shared in (each for each in blocks[0].runs if each.name == "shared"):
            nbytes = len(blocks) * shared.unit_bytes
            yield UnitKind("shared", shared.units, len(blocks), nbytes, nbytes)


def among(links: LinkTable, members: Members) -> LinkTable:
    """Return the links between the members, which are numbered 0, 1, ... in their order."""
    pairs = ((a, b) for a in range(len(members)) for b in range(a + 1, len(members)))
    return LinkTable(len(members), {(a, b): links.between(members[a], members[b]) for a, b in pairs})


def _run(block: BlockShape, name: str) -> RunLayout:
    return next(run for run in block.runs if run.name == name)
