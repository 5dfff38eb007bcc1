"""The split of a model over nodes: from units and shares to one `Shard` per rank, and how many requests fit."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from tpi.config import RECURRENT, BlockKind, ModelConfig
from tpi.errors import ModelError, PlanError, UsageError, WeightsError
from tpi.net.messages import StagePlan
from tpi.pack.blockfile import BlockShape
from tpi.pack.layout import RunLayout, RunName
from tpi.pack.library.locate import Located, pack_name
from tpi.pack.reader import Pack
from tpi.partition import Range, Shard, deal, deal_experts, kv_range

Plans = TypeVar("Plans")

EQUAL = "equal"  # value of --split
_NEAR = 32  # the maximum number of requests is found to within one part in this number


@dataclass(frozen=True)
class Split:
    """Each node's share of the heads and of the neurons of each kind of block, the master first.

    The shares of one kind are relative numbers of any scale. If they are whole and add up to the number of units, they
    are dealt exactly. `stages` are the stages for which the shares were planned; empty: all nodes are in one stage.
    """

    heads: tuple[float, ...]
    ffn: tuple[float, ...]
    experts: tuple[float, ...]
    shared: tuple[float, ...]
    stages: tuple[StagePlan, ...] = ()

    @classmethod
    def of(cls, shares: "Sequence[float] | Split") -> "Split":
        """Return `shares` as a split. A sequence of numbers gives each node the same share of every kind."""
        if isinstance(shares, Split):
            return shares
        alike = tuple(shares)
        return cls(alike, alike, alike, alike)

    def among(self, ranks: Sequence[int]) -> "Split":
        """Return the split with only the shares of `ranks`."""
        heads, ffn, experts, shared = (
            tuple(kind[rank] for rank in ranks) for kind in (self.heads, self.ffn, self.experts, self.shared)
        )
        return Split(heads, ffn, experts, shared)

    def weights(self) -> list[float]:
        """Return each node's part of the heads plus its part of the neurons, as a measure of its part of a layer."""
        return [
            heads / sum(self.heads) + ffn / (sum(self.ffn) or 1)
            for heads, ffn in zip(self.heads, self.ffn, strict=True)
        ]


@dataclass(frozen=True)
class Units:
    """The number of units of each kind in a layer of a model, and the number of heads in a unit."""

    query: int
    kv: int
    ffn: int  # 0: no layer has a dense feed-forward block
    query_heads: int
    kv_heads: int
    experts: int = 0  # routed experts of a block
    expert: int = 0  # units of each expert
    shared: int = 0  # units of shared experts, which all tokens use
    value: int = 0  # units of value heads, or of channels, in recurrent layers
    value_heads: int = 1  # value heads of a unit
    key_heads: int = 1  # key heads of a unit

    @classmethod
    def of(cls, config: ModelConfig, layers: Iterable[Iterable[BlockShape]]) -> "Units":
        """Count the units of each kind in the blocks of all layers.

        A number is the same in all layers that are counted. Layers with twice the neurons (`wide_ffn`) are left out.
        So are the KV heads of layers with `full_heads`; their query units are the same, and `deal_shards` deals their
        KV heads separately.
        """
        runs = {
            (block.kind, run.name): run
            for number, layer in enumerate(layers)
            for block in layer
            for run in block.runs
            if not (config.has_full_heads(number) if block.kind == "attention" else config.has_wide_ffn(number))
        }
        query, kv = runs["attention", "query"], runs["attention", "kv"]
        value, key, heads = _of_recurrent(runs, "value"), _of_recurrent(runs, "key"), config.state_heads
        dense, routed, shared = (
            runs[name].units if name in runs else 0
            for name in (("ffn", "neuron"), ("experts", "neuron"), ("experts", "shared"))
        )
        experts = config.mixture.experts if config.mixture and routed else 0
        return cls(
            query=query.units,
            kv=kv.units,
            ffn=dense,
            query_heads=query.width // config.head_dim,
            kv_heads=kv.width // config.kv_width,
            experts=experts,
            expert=routed // max(experts, 1),
            shared=shared,
            value=value.units if value else 0,
            value_heads=value.width // heads.value if value and heads else 1,
            key_heads=key.width // heads.key if key and heads else 1,
        )


def deal_shards(config: ModelConfig, units: Units, shares: Sequence[float] | Split) -> list[Shard]:
    """Deal heads and neurons over nodes in proportion to `shares`; rank 0 is the master.

    Raises:
        PlanError: if there are more nodes with a positive share than units of some kind.
    """
    split = Split.of(shares)
    query = _deal("query-head units", units.query, split.heads)
    ffn = _deal("FFN units", units.ffn, split.ffn)
    shared = _deal("units of shared experts", units.shared, split.shared)
    experts = _deal_experts(units, split.experts)
    kv = [kv_range(part, units.query_heads, units.kv_heads, config.heads, config.kv_heads) for part in query]
    full_heads = config.full_heads.kv_heads if config.full_heads else config.kv_heads
    full_kv = [kv_range(part, units.query_heads, units.kv_heads, config.heads, full_heads) for part in query]
    value = _deal("units of recurrent layers", units.value, split.heads)
    key = [_key_range(config, units, part) for part in value]
    return [
        Shard(q, k, n, s, *e, *d)
        for q, k, n, s, e, *d in zip(query, kv, ffn, shared, experts, value, key, full_kv, strict=True)
    ]


def _of_recurrent(runs: Mapping[tuple[BlockKind, RunName], RunLayout], name: RunName) -> RunLayout | None:
    return next((run for (kind, run_name), run in runs.items() if kind in RECURRENT and run_name == name), None)


def _key_range(config: ModelConfig, units: Units, value: Range) -> Range:
    """Return the key-head units that the value-head units in `value` need."""
    heads = config.state_heads
    if heads is None:
        return Range(0, 0)
    return kv_range(value, units.value_heads, units.key_heads, heads.heads, heads.key_heads)


def units_of(pack: Pack) -> Units:
    """Return the units into which a layer of `pack` can be divided."""
    return Units.of(pack.config, ([block.shape for block in layer] for layer in pack.layers))


def refuse_too_many(located: Located, dtype: str, cache: Path, shares: Sequence[float]) -> None:
    """Raise PlanError, before any worker is called, if a node with a positive share would get no unit.

    Raises:
        PlanError: if a node would get no unit.
        ModelError: if the model cannot be packed.
    """
    if sum(share > 0 for share in shares) < 2:
        return
    packed = located.path if located.kind == "pack" else cache / "packs" / pack_name(located, dtype)
    try:
        pack = Pack.open(packed)
    except (ModelError, WeightsError):  # there is no pack yet, or it will be repaired
        if located.kind != "pack":
            deal_shards(*_before_packing(located.path, dtype), shares)
        return
    deal_shards(pack.config, units_of(pack), shares)


def _before_packing(source: Path, dtype: str) -> tuple[ModelConfig, Units]:
    from tpi.pack.builder.build import open_source
    from tpi.pack.builder.plan import plan_pack

    opened = open_source(source)
    with closing(opened.source):
        layers = plan_pack(opened.model, opened.source, dtype).layers
    config = opened.model.config
    return config, Units.of(config, ([block.shape for block in layer] for layer in layers))


def parse_split(text: str | None, nodes: int) -> list[float]:
    """Parse `--split 3,2,1` into shares, one per node, master first; equal ones if `text` is None or `equal`.

    Raises:
        UsageError: if `text` is not one non-negative number for each node, or all numbers are 0.
    """
    if text in (None, EQUAL):
        return [1.0] * nodes
    assert text is not None
    try:
        shares = [float(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(
            f"--split {text!r} is neither equal, auto nor a list of numbers; write for example --split 3,2,1"
        ) from None
    if not all(0 <= share < math.inf for share in shares) or not 0 < sum(shares) < math.inf:
        raise UsageError(f"--split {text}: shares are numbers of 0 or more, not all 0; write for example --split 3,2,1")
    if len(shares) != nodes:
        raise UsageError(f"--split {text} has {len(shares)} shares for {nodes} nodes; give one per node, master first")
    return shares


def _deal_experts(units: Units, shares: Sequence[float]) -> list[tuple[Range, Range]]:
    holders = sum(share > 0 for share in shares)
    if not units.experts:
        return [(Range(0, 0), Range(0, 0)) for _ in shares]
    if holders > max(units.expert, units.experts):
        raise PlanError(
            f"this model has {units.experts} experts of {units.expert} units, too few for {holders} nodes; use at most "
            f"{max(units.expert, units.experts)} nodes"
        )
    return deal_experts(units.experts, units.expert, shares)


def _deal(kind: str, units: int, shares: Sequence[float]) -> list[Range]:
    if not units:
        return [Range(0, 0) for _ in shares]
    holders = sum(share > 0 for share in shares)
    if holders > units:
        raise PlanError(f"this model has {units} {kind}, too few for {holders} nodes; use at most {units} nodes")
    return deal(units, shares)


def most_that_fit(wanted: int, plans: Callable[[int], Plans]) -> tuple[int, Plans]:
    """Return the highest number of requests, up to `wanted`, for which `plans` succeeds, and those plans.

    Bisect between the highest success and the lowest failure, to within one part in 32.

    Raises:
        PlanError: the error for one request, if one request does not fit.
    """
    fitting, failed, trying = 0, wanted + 1, wanted
    found: list[Plans] = []
    while not found or failed - fitting > max(1, fitting // _NEAR):
        try:
            found = [plans(trying)]
        except PlanError:
            if trying == 1:
                raise
            failed = trying
        else:
            fitting = trying
        trying = (fitting + failed) // 2
    return fitting, found[0]
