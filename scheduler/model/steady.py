"""The conditions under which streaming costs nothing: the paper's propositions 3 to 6, for a ring of any depth.

Times are seconds of one node. docs/steady-state.md has the symbols and the proofs.
"""

from collections.abc import Collection, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TypeVar

from scheduler.model.placement import PAPERS_LAYER, Placement, Speeds, kinds_of, place, place_window
from scheduler.model.ring import Ring, neighbours
from scheduler.model.timeline import NO_OTHER_WAITS, Costs, OtherWaits, replay, simulate
from tpi.devices.pages import round_up
from tpi.pack.layout import BlockKind

_Number = TypeVar("_Number", int, float)

_NO_STALL = 0.005  # waiting up to this share of the token time counts as none
_SLOWER = 1.1  # an advised setting must not wait even if loads take so many times as long as measured
_HALVINGS = 4  # steps of the bisection between the largest ring and all blocks resident
_DEEPEST = 16  # the most blocks in memory that are tried
_RINGS = (2, 3, 4, 6, 8, 12, 16)  # sizes of the ring that are tried, in blocks
_TOKENS = 24  # tokens simulated


@dataclass(frozen=True)
class Times:
    """Mean seconds to compute a block of each kind, to load it, and to make one allreduce.

    `layer` has the kinds of a layer's blocks, in order. `tail` is the seconds between two tokens in addition to an
    allreduce; the propositions leave it out.
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
        """Seconds to compute each block of a layer."""
        return [self.ffn if kind == "ffn" else self.attention for kind in self.layer]

    @property
    def loads(self) -> list[float]:
        """Seconds to load each block of a layer."""
        return [self.load_ffn if kind == "ffn" else self.load_attention for kind in self.layer]

    @property
    def busy(self) -> float:
        """Seconds to compute one layer and to make its allreduces."""
        return sum(self.computes) + len(self.layer) * self.allreduce

    @property
    def load(self) -> float:
        """Seconds to load one layer."""
        return sum(self.loads)

    @classmethod
    def of(cls, costs: Costs, streamed: Collection[int] = (), kinds: Sequence[BlockKind] | None = None) -> "Times":
        """Return the mean times of measured `costs`, over the blocks of each kind.

        `kinds` is the kind of each block. If some blocks of a kind are `streamed`, only their loads are averaged.
        Resident blocks were loaded once, into memory that had never been touched, which is slower.
        """
        kinds = kinds_of(len(costs.compute), kinds)
        ffn = [block for block, kind in enumerate(kinds) if kind == "ffn"]
        others = [block for block, kind in enumerate(kinds) if kind != "ffn"]
        layer = _period(kinds)
        alike = costs.exchange[len(layer) - 1 : -1 : len(layer)]  # after the last block of each layer but the last
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
        """Return the costs of `layers` layers with these times."""
        exchange = [self.allreduce] * (len(self.layer) * layers)
        exchange[-1] += self.tail
        return Costs(self.computes * layers, exchange, self.loads * layers)

    def with_slower_loads(self, factor: float) -> "Times":
        """Return the same times with every load `factor` times as long."""
        return replace(self, load_attention=factor * self.load_attention, load_ffn=factor * self.load_ffn)


def is_loose(times: Times) -> bool:
    """Return True if a window that is deep enough would never wait for the disk in the long run (proposition 3)."""
    return times.busy >= times.load


def is_tight(times: Times) -> bool:
    """Return True if a block loads at most as long as the block before it computes and exchanges (proposition 4).

    A window of two blocks then never waits.
    """
    loads = times.loads[1:] + times.loads[:1]
    return all(busy + times.allreduce >= load for busy, load in zip(times.computes, loads, strict=True))


def layer_seconds(times: Times, window: int) -> float:
    """Return the seconds per layer in the long run with `window` blocks in memory and every block streamed.

    It is the largest of three times: the layer's busy time, its load time, and the longest way from a block to the same
    block of the next layer in the graph of docs/steady-state.md.
    """
    return max(times.busy, times.load, *(_longest_way(times, window, first) for first in range(len(times.layer))))


def longest_retain(times: Times) -> int | None:
    """Return the largest T such that one resident FFN block in every T is enough (proposition 6).

    0 means that no resident block is needed, None that no T is enough.
    """
    if is_loose(times):
        return 0
    longest = int(times.layer.count("ffn") * times.load_ffn / (times.load - times.busy))
    return longest or None


def least_resident(total: int, busy: float, speed: float) -> int:
    """Return how many of `total` bytes must be resident for loads at `speed` (bytes/s) to take at most `busy` s."""
    return max(0, round(total - busy * speed))


@dataclass(frozen=True)
class SteadyReport:
    """The verdict on a node: whether it waits for its disk, and the setting with which it would not wait.

    The setting is advised even if the node does not wait. Times are in seconds, sizes in bytes.
    """

    times: Times
    loose: bool  # `is_loose` (proposition 3)
    tight: bool  # `is_tight` (proposition 4)
    steady: bool  # the placement in use is predicted not to wait
    token_seconds: float  # predicted for the placement in use
    stall_seconds: float  # waiting per token, part of `token_seconds`
    memory_bytes: int  # memory of the placement in use
    window: int | None  # blocks in memory that reach the steady state; None: no number does
    retain: int | None  # with this window, one FFN block in every `retain` is resident; 0: none
    window_bytes: int | None  # memory that this setting takes
    least_bytes: int | None  # if the node waits and `window` is None: memory for blocks with which it would not wait


def judge_streaming(
    placement: Placement,
    costs: Costs,
    history: Sequence[Costs] = (),
    tiles: Sequence[int] = (),
    planned: Placement | None = None,
    kinds: Sequence[BlockKind] | None = None,
    other_waits: OtherWaits = NO_OTHER_WAITS,
) -> SteadyReport:
    """Judge whether a placement waits for the disk, by measured seconds per block, and advise a setting that does not.

    If the placement waits, the advised setting allows for loads that take 10% longer than measured (`_SLOWER`). It is
    calculated without the other waits.

    Args:
        placement: the placement in use.
        costs: the measurements of `MemoryWindow.costs`.
        history: the same costs for each of the last tokens (`MemoryWindow.history`).
        tiles: how many segments of the placement each block has; empty: one each.
        planned: the placement before resident neighbours were joined; None: none were. The memory that would end the
            waiting is calculated from its blocks.
        kinds: the kind of each block.
        other_waits: waits that the measured exchanges contain and that are not for this node's blocks.
    """
    tiles, history = tiles or [1] * len(placement.sizes), history or [costs]
    net = other_waits.subtracted_from(costs)
    blocks, streamed = whole(net, set(placement.ring.blocks), tiles, placement.sizes)
    kinds = kinds_of(len(tiles), kinds)
    times = Times.of(blocks, streamed, kinds)
    token, stall = replay(placement.ring, history, max(_TOKENS, 2 * len(history))).typical
    steady = stall + other_waits.own <= _NO_STALL * token
    enough = stall <= _NO_STALL * token and _waits(placement.ring, net) <= _NO_STALL
    waits = None if enough else (frozenset(range(len(tiles))) - streamed, placement.ring.size)
    later = times if steady else times.with_slower_loads(_SLOWER)
    rows = other_waits.rows > _NO_STALL * token  # only with all blocks resident are the rows in memory
    advised = None if rows else advise(_sums(placement.sizes, tiles), later, waits, kinds)
    least = planned or placement
    return SteadyReport(
        times=times,
        loose=is_loose(times),
        tight=is_tight(times),
        steady=steady,
        token_seconds=token,
        stall_seconds=stall + other_waits.own,
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
    """Return the costs of each block, and the numbers of the blocks that are at least partly streamed.

    `tiles` has the number of segments of each block; `costs`, `streamed` and `sizes` are those of segments. The load
    time of a partly resident block is scaled up from its streamed segments to the whole block, by bytes.
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
    """Return the window and the retention that never wait and need the least memory, and this memory in bytes.

    A retention of T means that every T-th FFN block is resident; 0: none. Return None if every setting waits.

    Args:
        sizes: bytes of each block.
        times: mean times of the node.
        waits: the resident blocks, and the bytes of the ring, of a placement that was measured to wait. A setting is
            not advised if its resident blocks are all among these and its ring is not larger. None: no placement.
        kinds: the kind of each block.
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
    """Return a budget for resident blocks and a ring with which `place` finds a placement that does not wait for the
    disk.

    The budget, in bytes, is at least the memory of `placement`. The next run measures speeds of its own, and `place`
    chooses by them. So the budget is such that the placement chosen for each of the given speeds does not wait.

    Args:
        placement: the placement in use, or the planned one.
        speeds: the slowest speeds to expect. Waits are simulated with them.
        faster: further speeds for which `place` may choose.
        measured: measured seconds per block; if given, waits are also simulated with its seconds for computing and
            exchanging, and with loads at `speeds`.
    """
    sizes, costs = placement.sizes, speeds.costs(placement.sizes)
    likely = [costs]
    if measured is not None and len(measured.compute) == len(sizes):  # else resident neighbours were joined
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
    least, most = rings[-1], total  # beyond these, `place` makes blocks resident rather than deepen the ring
    for _ in range(_HALVINGS):
        middle = (least + most) // 2
        least, most = (least, middle) if good(middle) else (middle, most)
    return most


def _suffices(placement: Placement, times: Times, costs: Costs, window: int, retain: int) -> bool:
    if not retain:
        return layer_seconds(times, window) <= (1 + _NO_STALL) * times.busy
    return _waits(placement.ring, costs) <= _NO_STALL


def _waits(ring: Ring, costs: Costs) -> float:
    """Return the share of a token's time that is spent waiting for loads, by simulation."""
    timeline = simulate(ring, costs, _TOKENS)
    return timeline.steady_stall / timeline.steady_token if timeline.steady_stall else 0.0


def _speeds(placement: Placement, costs: Costs, times: Times, blocks: int) -> Speeds:
    """Return the node's speeds for `blocks` blocks: computing as in `costs`, loads and allreduces as in `times`."""
    total, computing = sum(placement.sizes), sum(costs.compute)
    compute = total / computing if computing else float("inf")
    return Speeds(total / (times.load * blocks / len(times.layer)), compute, times.allreduce)


def _longest_way(times: Times, window: int, first: int) -> float:
    """Return the seconds from the start of block `first` in one layer to its start in the next layer.

    They are the longest way in the graph of docs/steady-state.md, with `window` blocks in memory.
    """
    around = [(first + at) % len(times.layer) for at in range(len(times.layer) + 1)]
    computes, loads = [times.computes[at] for at in around], [times.loads[at] for at in around]
    starts, loaded = [0.0], 0.0  # when each block starts; when the last load that waited for a release ends
    for at in range(1, len(around)):
        if at >= window:
            loaded = max(loaded, starts[at - window] + computes[at - window]) + loads[at]
        starts.append(max(starts[-1] + computes[at - 1] + times.allreduce, loaded))
    return starts[-1]


def _period(kinds: Sequence[BlockKind]) -> tuple[BlockKind, ...]:
    """Return the kinds of the blocks of one layer: the shortest run of kinds that `kinds` repeats.

    If layers differ, the result is `kinds`.
    """
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
