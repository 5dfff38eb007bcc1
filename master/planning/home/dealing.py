"""The problem of splitting a model over a home: bytes of each kind of unit, the master's tables, the cost of sums."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from allreduce.predict import PREDICTIONS, predict
from master.planning.home.members import Home
from master.planning.problem import block_bytes, default_kv, layer_blocks, planning_problem
from master.planning.shapes import ModelShape
from scheduler.model.home.problem import HomeNode, HomeProblem, Members, UnitKind
from scheduler.model.home.stages import MASTER, LayerWork, StageProblem
from scheduler.model.offload.problem import Problem
from scheduler.model.offload.work import Workload
from tpi.block import joining
from tpi.config import RECURRENT
from tpi.kernels.constants import STREAM_TOKENS
from tpi.kernels.kv import KvDtype, vector_bytes
from tpi.net.wire import wire_format
from tpi.pack.blockfile import BlockShape
from tpi.pack.layout import WHOLE_RUNS, RunLayout
from tpi.partition import FFN_UNIT
from tpi.topology.links import LinkTable

# Software per sum and hop, from runs on two cores: 0.1 ms for a sum of 2 nodes, 0.5 of 4, 1.3 of 8; 0.5 ms for a hop.
_SUM_NODE_S, _SUM_BASE_S = 0.2e-3, 0.3e-3
_HOP_S = 0.5e-3


@dataclass(frozen=True)
class HomeModel:
    """The problem of splitting a model over a home, for one kind of request.

    Layouts are chosen for `streams` answers at once; all other times are for one answer.
    """

    shape: ModelShape
    home: Home
    request: Workload
    kv_dtype: KvDtype | None = None
    streams: int = 1

    @cached_property
    def wire(self) -> str:
        """The format in which partial sums travel, as `master.deployment.deploy.wire` chooses it."""
        return "f32" if default_kv(self.shape) == "f32" else "bf16"

    @cached_property
    def _kv_dtype(self) -> KvDtype:
        return self.kv_dtype or default_kv(self.shape)

    @property
    def sums(self) -> int:
        """Number of allreduces of a step: one for each block that does not share it with the next one."""
        return sum(not joining(self.shape.config, block.kind) for block in self.shape.blocks)

    @cached_property
    def whole(self) -> Problem:
        """The problem of the whole model on the master alone.

        The memory for other purposes than units is the same on every node.
        """
        return planning_problem(self.shape, self.home.machines[0], self.request, None, self.kv_dtype)

    @cached_property
    def problem(self) -> HomeProblem:
        """The problem that `scheduler.model.home.solve.best_split` solves: all layers in one stage."""
        return self.staged.part(0, self.shape.config.layers, (MASTER,))

    @cached_property
    def staged(self) -> StageProblem:
        """The problem of choosing stages, which `scheduler.model.home.layouts.best_layout` solves."""
        config, segments = self.shape.config, self.whole.work.segments
        weights, nbytes = (sum(getattr(each, what) for each in segments) for what in ("weights", "nbytes"))
        return StageProblem(
            tuple(self._node(rank) for rank in range(len(self.home.names))),
            tuple(self._layers()),
            config.stage_cuts,
            lambda members, tokens: self.exchange(members, tokens)[0],
            self._hop,
            weights / max(1, nbytes),
        )

    def exchange(self, members: Members, tokens: int) -> tuple[float, str]:
        """Return the seconds of one allreduce of `tokens` tokens' partial results, and the fastest algorithm."""
        if (members, tokens) not in self._exchanges:
            self._exchanges[members, tokens] = self._exchange(members, tokens)
        return self._exchanges[members, tokens]

    @cached_property
    def _exchanges(self) -> dict[tuple[Members, int], tuple[float, str]]:
        return {}

    def _exchange(self, members: Members, tokens: int) -> tuple[float, str]:
        links, values = among(self.home.links, members), tokens * self.shape.config.hidden
        if links.size == 1:
            return 0.0, "loopback"
        seconds, name = min((predict(name, links, values, self.wire), name) for name in PREDICTIONS)
        return seconds + sum_overhead(links.size, self.home.software), name

    def _hop(self, source: int, members: Members, tokens: int) -> float:
        """Return the seconds to send the hidden states of `tokens` tokens from node `source` to all `members`."""
        links = [self.home.links.between(source, rank) for rank in members if rank != source]
        if not links:
            return 0.0
        nbytes = wire_format("f32" if tokens <= STREAM_TOKENS else self.wire).nbytes(tokens * self.shape.config.hidden)
        return _HOP_S + max(link.latency_s + len(links) * nbytes / link.bytes_per_s for link in links)

    def items(self, kind: str) -> tuple[int, int]:
        """Return the number of heads or neurons in a unit of `kind`, and in total. The last unit may have fewer."""
        config, mixture = self.shape.config, self.shape.config.mixture
        if kind == "heads":
            units = next(each.units for each in self.problem.kinds if each.kind == kind)
            return -(-config.heads // units), config.heads
        neurons = {"experts": mixture.width, "shared": mixture.shared} if mixture else {}
        return FFN_UNIT, neurons.get(kind, config.intermediate)

    def _node(self, rank: int) -> HomeNode:
        machine, needs = self.home.machines[rank], self.whole.needs
        tables = 0 if rank else block_bytes(self.shape.head)
        fixed = needs.fixed + self.whole.chunk * needs.token + tables
        host = machine.host
        turn = tables / host.read
        return HomeNode(
            self.home.names[rank], host.read, machine.disk.read, machine.memory, fixed, turn, host.operations
        )

    def _layers(self) -> Iterator[LayerWork]:
        for layer, numbers in enumerate(layer_blocks(self.shape)):
            blocks = [self.shape.blocks[number] for number in numbers]
            sums = sum(not joining(self.shape.config, block.kind) for block in blocks)
            yield LayerWork(tuple(self._dealt(layer, blocks)), sums, sum(map(_everywhere, blocks)))

    def _dealt(self, layer: int, blocks: Sequence[BlockShape]) -> Iterator[UnitKind]:
        config = self.shape.config
        for block in blocks:
            nbytes = block_bytes(block) - _everywhere(block)
            if block.kind == "attention" or block.kind in RECURRENT:  # dealt by the same shares
                units, own = self._heads, config.at_layer(layer)
                keeps = block.kind == "attention" and config.kv_layer(layer) == layer
                token = 2 * vector_bytes(own.head_dim, self._kv_dtype) * own.kv_heads if keeps else 0
                read = nbytes + token * (self.request.prompt + self.request.answer / 2)
                yield UnitKind("heads", units, 1, nbytes / units, read / units, token * self.request.context / units)
            elif block.kind == "ffn":
                units = _run(next(each for each in self.shape.blocks if each.kind == "ffn"), "neuron").units
                yield UnitKind("neurons", units, 1, nbytes / units, nbytes / units)
            elif block.kind == "experts":
                yield from self._experts(block)

    @property
    def _heads(self) -> int:
        """Number of units of query heads in a layer."""
        return _run(next(block for block in self.shape.blocks if block.kind == "attention"), "query").units

    def _experts(self, block: BlockShape) -> Iterator[UnitKind]:
        """Yield the units of a block of experts: those of its routed experts, and those of its shared ones if it has
        any.

        A unit of routed experts is the same slice of every expert, of which a token reads only those that it chooses.
        """
        mixture = self.shape.config.mixture
        assert mixture is not None
        run = _run(block, "neuron")
        slices, nbytes = run.units // mixture.experts, run.unit_bytes * mixture.experts
        yield UnitKind("experts", slices, 1, nbytes, nbytes * mixture.used / mixture.experts)
        for shared in (each for each in block.runs if each.name == "shared"):
            yield UnitKind("shared", shared.units, 1, shared.unit_bytes, shared.unit_bytes)


def sum_overhead(nodes: int, measured: Mapping[int, float]) -> float:
    """Return the seconds that software adds to the time of the links in a sum between this number of nodes.

    `measured` has such seconds by the number of nodes. For a number that was not measured, a built-in figure is scaled
    by the ratio of measurement and built-in figure at the nearest measured number. Without any measurement, it is
    returned unscaled.
    """
    if nodes in measured:
        return measured[nodes]
    nearest = min(measured, key=lambda each: abs(each - nodes), default=nodes)
    return _usual_overhead(nodes) * (measured[nearest] / _usual_overhead(nearest) if measured else 1.0)


def _usual_overhead(nodes: int) -> float:
    return _SUM_NODE_S * nodes - _SUM_BASE_S


def _everywhere(block: BlockShape) -> int:
    """Return the bytes of those parts of a block (of latent attention) that each node of its stage has in full."""
    return sum(run.units * run.unit_bytes for run in block.runs if run.name in WHOLE_RUNS)


def among(links: LinkTable, members: Members) -> LinkTable:
    """Return the links between `members`, which are renumbered 0, 1, ... in their order."""
    pairs = ((a, b) for a in range(len(members)) for b in range(a + 1, len(members)))
    return LinkTable(len(members), {(a, b): links.between(members[a], members[b]) for a, b in pairs})


def _run(block: BlockShape, name: str) -> RunLayout:
    return next(run for run in block.runs if run.name == name)
