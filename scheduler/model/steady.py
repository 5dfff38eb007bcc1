"""When does streaming cost nothing? The paper's propositions 3 to 6, for a ring of any depth; seconds of one node.

docs/steady-state.md has the symbols and the proofs.
"""

from collections.abc import Collection, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TypeVar

from scheduler.model.placement import PAPERS_LAYER, Placement, Speeds, kinds_of, place, place_window
from scheduler.model.ring import Ring, neighbours
from scheduler.model.timeline import NOTHING_ELSE, Costs, OtherWaits, replay, simulate
from tpi.devices.pages import round_up
from tpi.pack.layout import BlockKind

_Number = TypeVar("_Number", int, float)

_NO_STALL = 0.005  # of the token time: less waiting than this counts as none
_SLOWER = 1.1  # times as long as measured do loads take where a setting is advised
_HALVINGS = 4  # of what lies between the deepest ring and everything
_DEEPEST = 16  # blocks in memory that are tried
_RINGS = (2, 3, 4, 6, 8, 12, 16)  # blocks in it, beside what stays
_TOKENS = 24  # simulated


@dataclass(frozen=True)
class Times:
    """Mean seconds of a block of each kind, and of the allreduce after it; `layer` has a layer's blocks in order.

    `tail`: seconds between two tokens, in addition to an allreduce. A ring loads ahead in them as far as it is deep, so
    that the propositions leave them out.
    """

    attention: float
    ffn: float
    allreduce: float
    load_attention: float
    load_ffn: float
    layer: tuple[BlockKind, ...] = PAPERS_LAYER
    tail: float = 0.0

    @property
    def computes(self) -> list[float]:
        """Seconds that each block of a layer computes."""
        return [self.ffn if kind == "ffn" else self.attention for kind in self.layer]

    @property
    def loads(self) -> list[float]:
        """Seconds that each block of a layer takes to load."""
        return [self.load_ffn if kind == "ffn" else self.load_attention for kind in self.layer]

    @property
    def busy(self) -> float:
        """Seconds that one layer computes and exchanges."""
        return sum(self.computes) + len(self.layer) * self.allreduce

    @property
    def load(self) -> float:
        """Seconds that one layer loads."""
        return sum(self.loads)

    @classmethod
    def of(cls, costs: Costs, streamed: Collection[int] = (), kinds: Sequence[BlockKind] | None = None) -> "Times":
        """Means over the blocks of a kind (`kinds`: of each); of loads, over the `streamed` ones of a kind, if any.

        Blocks that stay were loaded once, into memory that had never been touched, which is slower.
        """
        kinds = kinds_of(len(costs.compute), kinds)
        ffn = [block for block, kind in enumerate(kinds) if kind == "ffn"]
        others = [block for block, kind in enumerate(kinds) if kind != "ffn"]
        layer = _period(kinds)
        alike = costs.exchange[len(layer) - 1 : -1 : len(layer)]  # after the last block of each other layer
        tail = max(0.0, costs.exchange[-1] - _mean(alike)) if alike else 0.0
        return cls(
            _mean([costs.compute[block] for block in others]),
            _mean([costs.compute[block] for block in ffn]),
            _mean(costs.exchange) - (tail / len(costs.exchange) if tail else 0.0),
            _load(costs, others, streamed),
            _load(costs, ffn, streamed),
            layer,
            tail,
        )

    def costs(self, layers: int) -> Costs:
        """The same for every layer."""
        exchange = [self.allreduce] * (len(self.layer) * layers)
        exchange[-1] += self.tail
        return Costs(self.computes * layers, exchange, self.loads * layers)

    def with_slower_loads(self, factor: float) -> "Times":
        """Return the same where every load takes so many times as long."""
        return replace(self, load_attention=factor * self.load_attention, load_ffn=factor * self.load_ffn)


def is_loose(times: Times) -> bool:
    """Proposition 3: a deep enough window never waits in the long run."""
    return times.busy >= times.load


def is_tight(times: Times) -> bool:
    """Proposition 4: each load is hidden behind the block before; a window of two never waits."""
    loads = times.loads[1:] + times.loads[:1]
    return all(busy + times.allreduce >= load for busy, load in zip(times.computes, loads, strict=True))


def layer_seconds(times: Times, window: int) -> float:
    """Seconds per layer in the long run with `window` blocks in memory, everything streamed.

    The longest way round one layer in the graph of docs/steady-state.md, or what a layer is busy or loads for.
    """
    return max(times.busy, times.load, *(_way_round(times, window, first) for first in range(len(times.layer))))


def longest_retain(times: Times) -> int | None:
    """Proposition 6: the largest T such that one FFN block kept in every T is enough. 0: none needed; None: none is."""
    if is_loose(times):
        return 0
    longest = int(times.layer.count("ffn") * times.load_ffn / (times.load - times.busy))
    return longest or None


def least_resident(total: int, busy: float, speed: float) -> int:
    """Bytes of `total` that must stay, whatever they are, for loads at `speed` (bytes/s) to take at most `busy` (s)."""
    return max(0, round(total - busy * speed))


@dataclass(frozen=True)
class SteadyReport:
    """Does this node wait for its disk, and what would end it. Seconds and bytes."""

    times: Times
    loose: bool  # proposition 3
    tight: bool  # proposition 4
    steady: bool  # predicted for the placement in use
    token_seconds: float  # predicted for the placement in use
    stall_seconds: float  # of it, per token
    memory_bytes: int  # of the placement in use
    window: int | None  # blocks in memory that reach the steady state; None: no number does
    retain: int | None  # with one FFN block kept in every so many; 0: none need be
    window_bytes: int | None  # memory that this takes
    least_bytes: int | None  # where no window does and the placement in use does not: memory for blocks that would


def judge_streaming(
    placement: Placement,
    costs: Costs,
    history: Sequence[Costs] = (),
    tiles: Sequence[int] = (),
    planned: Placement | None = None,
    kinds: Sequence[BlockKind] | None = None,
    beside: OtherWaits = NOTHING_ELSE,
) -> SteadyReport:
    """Judge a placement by measured seconds per block: `MemoryWindow.costs`, and its `history` of the last tokens.

    `tiles`: how many of the placement's segments each block is, if not one each; `planned`: the placement before
    neighbours that stay were joined, if any were, which more memory would change; `kinds`: of each block; `beside`:
    what the measured exchanges hide. A setting is advised that does not wait once nothing of that is waited for, with
    loads that take a little longer than they did.
    """
    tiles, history = tiles or [1] * len(placement.sizes), history or [costs]
    net = beside.taken_from(costs)
    blocks, streamed = whole(net, set(placement.ring.blocks), tiles, placement.sizes)
    kinds = kinds_of(len(tiles), kinds)
    times = Times.of(blocks, streamed, kinds)
    token, stall = replay(placement.ring, history, max(_TOKENS, 2 * len(history))).typical
    steady = stall + beside.own <= _NO_STALL * token
    enough = stall <= _NO_STALL * token and _waits(placement.ring, net) <= _NO_STALL
    waits = None if enough else (frozenset(range(len(tiles))) - streamed, placement.ring.size)
    later = times if steady else times.with_slower_loads(_SLOWER)
    rows = beside.rows > _NO_STALL * token  # only where everything stays are they in memory
    advised = None if rows else advise(_sums(placement.sizes, tiles), later, waits, kinds)
    least = planned or placement
    return SteadyReport(
        times=times,
        loose=is_loose(times),
        tight=is_tight(times),
        steady=steady,
        token_seconds=token,
        stall_seconds=stall + beside.own,
        memory_bytes=placement.memory_bytes,
        window=advised[0] if advised else None,
        retain=advised[1] if advised else None,
        window_bytes=advised[2] if advised else None,
        least_bytes=None
        if steady or advised
        else sum(least.sizes)
        if rows
        else sufficient_ring(
            least, *(_speeds(placement, costs, one, len(tiles)) for one in (later, times)), measured=net
        ),
    )


def whole(
    costs: Costs, streamed: Collection[int], tiles: Sequence[int], sizes: Sequence[int]
) -> tuple[Costs, set[int]]:
    """Costs per block, and which are streamed, where each is so many `tiles`: segments with `costs` and `sizes`.

    A block that stays in part would load at the speed of its streamed tiles.
    """
    parts = list(_parts(tiles))
    load = []
    for part in parts:
        moved = [tile for tile in part if tile in streamed] or part
        nbytes = sum(sizes[tile] for tile in moved)
        share = sum(sizes[part.start : part.stop]) / nbytes if nbytes else 1
        load.append(share * sum(costs.load[tile] for tile in moved))
    found = Costs(_sums(costs.compute, tiles), _sums(costs.exchange, tiles), load, costs.wake, costs.start)
    return found, {block for block, part in enumerate(parts) if any(tile in streamed for tile in part)}


def advise(
    sizes: Sequence[int],
    times: Times,
    waits: tuple[Set[int], int] | None = None,
    kinds: Sequence[BlockKind] | None = None,
) -> tuple[int, int, int] | None:
    """The window, retention (0: none) and bytes that reach the steady state in the least memory, if any do.

    `waits`: blocks that stay, and bytes of the ring, of a placement that was seen to wait. Neither it nor less of both
    is advised: means do not know of the loads that are late. `kinds`: of each block.
    """
    longest = longest_retain(times)
    if longest is None:
        return None
    costs = times.costs(len(sizes) // len(times.layer))
    found = []
    for retain in {longest, max(1, longest // 2), 1} if longest else {0}:
        for window in range(1, min(_DEEPEST, len(sizes)) + 1):
            placement = place_window(sizes, window, retain, kinds)
            if waits and placement.resident <= waits[0] and placement.ring.size <= waits[1]:
                continue
            if _suffices(placement, times, costs, window, retain):
                found.append((window, retain, placement.memory_bytes))
                break
    return min(found, key=lambda one: one[2], default=None)


def sufficient_ring(placement: Placement, speeds: Speeds, *faster: Speeds, measured: Costs | None = None) -> int:
    """Return bytes, more than `placement` has, with which `place` does not wait any more: what must stay, and a ring.

    `place` will choose by speeds that are measured later: it must not wait if these are `speeds` or one of `faster`,
    nor by the `measured` seconds of the placement's blocks.
    """
    sizes, costs = placement.sizes, speeds.costs(placement.sizes)
    likely = [costs]
    if measured is not None and len(measured.compute) == len(sizes):  # else neighbours that stay were joined
        likely.append(replace(costs, compute=measured.compute, exchange=measured.exchange))
    total = sum(sizes)
    stay = round_up(max(placement.memory_bytes, least_resident(total, costs.busy, speeds.disk)))
    rings = sorted({min(total, stay + neighbours(sizes, depth)) for depth in _RINGS})

    def good(size: int) -> bool:
        if size >= total:
            return True
        rings = [place(sizes, size, each).ring for each in (speeds, *faster)]
        return all(_waits(ring, one) <= _NO_STALL for ring in rings for one in likely)

    if (found := next(filter(good, rings), None)) is not None:
        return found
    least, most = rings[-1], total  # a deeper ring does not help where `place` has more blocks stay
    for _ in range(_HALVINGS):
        middle = (least + most) // 2
        least, most = (least, middle) if good(middle) else (middle, most)
    return most


def _suffices(placement: Placement, times: Times, costs: Costs, window: int, retain: int) -> bool:
    if not retain:
        return layer_seconds(times, window) <= (1 + _NO_STALL) * times.busy
    return _waits(placement.ring, costs) <= _NO_STALL


def _waits(ring: Ring, costs: Costs) -> float:
    """Share of the token time."""
    timeline = simulate(ring, costs, _TOKENS)
    return timeline.steady_stall / timeline.steady_token if timeline.steady_stall else 0.0


def _speeds(placement: Placement, costs: Costs, times: Times, blocks: int) -> Speeds:
    """The speeds that were measured, if all bytes are alike."""
    total, computing = sum(placement.sizes), sum(costs.compute)
    compute = total / computing if computing else float("inf")
    return Speeds(total / (times.load * blocks / len(times.layer)), compute, times.allreduce)


def _way_round(times: Times, window: int, first: int) -> float:
    """Seconds from the start of computing block `first` of a layer to that of the next layer's, by the longest way."""
    around = [(first + at) % len(times.layer) for at in range(len(times.layer) + 1)]
    computes, loads = [times.computes[at] for at in around], [times.loads[at] for at in around]
    starts, loaded = [0.0], 0.0  # when each block starts; when the last one is loaded that waited for a release
    for at in range(1, len(around)):
        if at >= window:
            loaded = max(loaded, starts[at - window] + computes[at - window]) + loads[at]
        starts.append(max(starts[-1] + computes[at - 1] + times.allreduce, loaded))
    return starts[-1]


def _period(kinds: Sequence[BlockKind]) -> tuple[BlockKind, ...]:
    """The shortest run of kinds that all of them repeat: a layer, or all where layers differ."""
    lengths = (length for length in range(1, len(kinds)) if len(kinds) % length == 0)
    length = next((one for one in lengths if list(kinds[one:]) == list(kinds[:-one])), len(kinds))
    return tuple(kinds[:length])


def _load(costs: Costs, kind: Sequence[int], streamed: Collection[int]) -> float:
    loads = {block: costs.load[block] for block in kind if costs.load[block]}
    return _mean([seconds for block, seconds in loads.items() if block in streamed] or list(loads.values()))


def _parts(tiles: Sequence[int]) -> Iterator[range]:
    ends = list(accumulate(tiles))
    yield from (range(end - count, end) for end, count in zip(ends, tiles, strict=True))


def _sums(values: Sequence[_Number], tiles: Sequence[int]) -> list[_Number]:
    return [sum(values[part.start : part.stop]) for part in _parts(tiles)]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
