"""What a node keeps on its accelerator, what passes through it, and where keys and values live (PIPO, section 3.5).

Segments that stay on the accelerator are computed there, always. The others lie in the host's memory or on its disk; a
step of enough tokens has them copied to the accelerator, one after the other, and a shorter one computes them where
they lie. Their keys and values then live in the host's memory, and visit the accelerator when it attends.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from scheduler.model.placement import Placement, Speeds, place, spread
from scheduler.model.ring import EMPTY, Ring, neighbours, smallest
from tpi.devices.pages import PAGE, round_up
from tpi.errors import PlanError
from tpi.kv import page_bytes
from worker.plan.node_plan import NodePlan
from worker.plan.segments import NodeSegment, cut_pieces

Weights = Literal["auto", "gpu", "ram", "disk"]
KvPlace = Literal["auto", "gpu", "ram"]
Pipeline = Literal["auto", "performance", "memory"]
LINK = Speeds(disk=8e9, compute=100e9)  # a laptop's PCIe and GPU, where nothing was measured


@dataclass(frozen=True)
class OffloadOptions:
    """How a node is to use its accelerator. `auto` is chosen by what fits."""

    weights: Weights = "auto"  # gpu: all stay there; ram, disk: all come from there for each use
    kv: KvPlace = "auto"
    pipeline: Pipeline = "auto"  # performance: the next segment loads while one computes; memory: one at a time
    crossover: int = 1  # tokens of a step from which what streams is computed on the accelerator; fewer: on the host
    speeds: Speeds = LINK  # of the link (`disk`) and the accelerator


@dataclass(frozen=True)
class OffloadPlan:
    """The decision. Pieces are all of the node's, in order of use; numbers index them."""

    pieces: tuple[NodeSegment, ...]
    kept: frozenset[int]  # stay on the accelerator
    ring: Ring  # the others', in its memory; `EMPTY` where all stay
    kv_on: frozenset[int]  # layers whose keys and values live on the accelerator
    stages: int  # layers' pages that are there at once while they visit it
    kv_layer_bytes: int  # of one layer's pages
    crossover: int
    weights: Weights

    @property
    def fed(self) -> list[int]:
        """Pieces that pass through the ring."""
        return [number for number in range(len(self.pieces)) if number not in self.kept]

    @cached_property
    def staged(self) -> tuple[int, ...]:
        """Layers whose keys and values live in the host's memory, in order of use."""
        return tuple(layer for layer in attention_layers(self.pieces) if layer not in self.kv_on)

    @property
    def memory_bytes(self) -> int:
        """Bytes that all of it takes on the accelerator."""
        kept = sum(_size(self.pieces[number]) for number in self.kept)
        visiting = self.stages if self.staged else 0
        return kept + self.ring.size + (len(self.kv_on) + visiting) * self.kv_layer_bytes

    def below(self, sizes: Sequence[int], fitting: Placement) -> Placement:
        """What of the pieces that are fed stays in the host's memory: what fits, all, or none; `sizes` are theirs.

        Raises:
            PlanError: if all are to stay there and do not fit.
        """
        if self.weights == "ram" and fitting.streamed_bytes:
            short = -(-fitting.streamed_bytes >> 20)
            raise PlanError(f"--weights ram keeps all weights in memory, and {short}MiB of them do not fit; try auto")
        if self.weights != "disk":
            return fitting
        every = range(len(sizes))
        rings = [smallest(every, sizes, depth) for depth in (2, 1)]
        ring = next((ring for ring in rings if ring.size <= fitting.memory_bytes), rings[-1])
        return Placement(tuple(sizes), frozenset(), ring)

    def over(self, below: Placement) -> "OffloadPlan":
        """The same above a tier that reads from disk in the order of use: its segments are all fed, or all the host's.

        Where keys and values keep some attention on the accelerator, a short step is computed there as a whole.
        """
        mixed = len({self.here(number) for number in self.fed}) > 1
        return replace(self, crossover=1) if mixed and below.streamed_bytes else self

    def here(self, number: int) -> bool:
        """Whether a short step computes this piece on the host: it does not stay on the accelerator, nor its KV."""
        piece = self.pieces[number]
        visits = number not in self.kept and self.crossover > 1
        return visits and (piece.block.kind != "attention" or piece.block.layer not in self.kv_on)


def attention_layers(pieces: Sequence[NodeSegment]) -> list[int]:
    """Layers that attend, in order of use."""
    return list(dict.fromkeys(piece.block.layer for piece in pieces if piece.block.kind == "attention"))


def decide_offload(plan: NodePlan, room: int, options: OffloadOptions) -> OffloadPlan:
    """What goes where, if the accelerator has `room` bytes for weights, keys and values: the first that fits of

    everything kept; the next segment loading while one computes; one segment at a time.

    Raises:
        PlanError: if what the options ask for does not fit; names the smallest room that would do.
    """
    choice = _Choice(plan, room, options)
    for attempt in choice.attempts():
        if attempt.memory_bytes <= room:
            return attempt
    asked = f"--weights {options.weights}, --kv {options.kv} and --pipeline {options.pipeline}"
    raise PlanError(
        f"{room >> 20}MiB of the accelerator's memory do not hold what {asked} ask for; "
        f"{-(-choice.least() >> 20)}MiB beside its buffers would do"
    )


class _Choice:
    """The search for one node."""

    def __init__(self, plan: NodePlan, room: int, options: OffloadOptions) -> None:
        self._pieces = tuple(replace(piece, device=1) for piece in cut_pieces(plan))
        self._sizes = [_size(piece) for piece in self._pieces]
        self._layers = attention_layers(self._pieces)
        self._room, self._options = room, options
        half = page_bytes(1, plan.kv_heads, plan.config.head_dim, plan.options.kv_dtype) // 2 * plan.options.pages
        self._kv_layer = 2 * round_up(half)

    def attempts(self) -> Iterator[OffloadPlan]:
        """From the fastest to the smallest; they may not fit."""
        if self._options.weights in ("auto", "gpu"):
            everything = frozenset(range(len(self._pieces)))
            yield self._offload(everything, EMPTY, stages=2)
            if self._options.kv == "auto":
                yield self._offload(everything, EMPTY, stages=2, kv_on=frozenset())
        if self._options.weights != "gpu":
            for depth in self._depths:
                yield self._keeping_some(depth)

    def least(self) -> int:
        """The fewest bytes that would do."""
        if self._options.weights == "gpu":
            return min(attempt.memory_bytes for attempt in self.attempts())
        return self._keeping_none(self._depths[-1]).memory_bytes

    @property
    def _depths(self) -> tuple[int, ...]:
        """Segments in the ring at once, and layers' pages beside them."""
        return {"auto": (2, 1), "performance": (2,), "memory": (1,)}[self._options.pipeline]

    def _keeping_none(self, depth: int) -> OffloadPlan:
        every = list(range(len(self._pieces)))
        return self._offload(frozenset(), smallest(every, self._sizes, depth), depth)

    def _keeping_some(self, depth: int) -> OffloadPlan:
        """As much as fits stays, unless the options say otherwise; the rest passes through a ring.

        Keys and values of attention that stays do too: the fewest layers that they may be of are searched for.
        """
        best = self._keeping_none(depth)
        low, high = 0, len(self._layers)
        while low <= high and self._options.weights == "auto":
            layers = (low + high) // 2
            found = self._leaving_room(depth, layers)
            if found is not None and found.memory_bytes > self._room:
                low = layers + 1  # more layers than that attend there
                continue
            high = layers - 1
            best = found or best
        return best

    def _leaving_room(self, depth: int, layers: int) -> OffloadPlan | None:
        """What stays beside the keys and values of so many layers; None if the ring has no room then."""
        kv = {"auto": layers, "gpu": len(self._layers), "ram": 0}[self._options.kv]
        visiting = depth if kv < len(self._layers) else 0
        room = (self._room - (kv + visiting) * self._kv_layer) // PAGE * PAGE
        if room < neighbours(self._sizes, depth):
            return None
        choose = place if depth > 1 else _one_at_a_time
        placement = choose(self._sizes, room, self._options.speeds)
        return self._offload(placement.resident, placement.ring, depth)

    def _offload(
        self, kept: frozenset[int], ring: Ring, stages: int, kv_on: frozenset[int] | None = None
    ) -> OffloadPlan:
        attending = frozenset(attention_layers([self._pieces[number] for number in kept]))
        chosen = {"auto": attending, "gpu": frozenset(self._layers), "ram": frozenset()}[self._options.kv]
        return OffloadPlan(
            pieces=self._pieces,
            kept=kept,
            ring=ring,
            kv_on=chosen if kv_on is None else kv_on,
            stages=stages,
            kv_layer_bytes=self._kv_layer,
            crossover=self._options.crossover,
            weights=self._options.weights,
        )


def _one_at_a_time(sizes: Sequence[int], room: int, speeds: Speeds) -> Placement:
    """As many pieces as fit stay, evenly spread, beside a ring for the largest of the others."""
    every = list(range(len(sizes)))
    for count in range(len(sizes), -1, -1):
        kept = frozenset(spread(every, count))
        ring = smallest([number for number in every if number not in kept], sizes, 1)
        if ring.size + sum(sizes[number] for number in kept) <= room:
            return Placement(tuple(sizes), kept, ring)
    raise AssertionError("the caller has seen that one piece fits")


def _size(piece: NodeSegment) -> int:
    return round_up(piece.nbytes)
