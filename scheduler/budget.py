"""What fits into `--memory`: all bytes that a node may use above its bare process, decided before anything is loaded.

In this order: small vectors, activations of one token and collective buffers; pages for the context asked for; a
prefill chunk, as large as memory allows; the head, if the blocks can still stream beside it; blocks, some of which
stay; the embedding, if all blocks stay. What cannot fit is refused with the smallest budget that would do, and with
the context that would fit. `scheduler.free` says what a node may use where the user did not.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from scheduler.model.placement import Placement, Speeds, place, place_window
from scheduler.model.ring import neighbours
from tpi.devices.pages import PAGE, round_up
from tpi.errors import PlanError
from tpi.kernels.constants import PAGE_TOKENS
from tpi.pack.layout import BlockKind

LONGEST_CHUNK = 512  # tokens of a prefill step, where memory and context allow them
_AMPLE_CHUNK = 256  # tokens: longer steps compute hardly faster, and save passes over what is streamed
_SHORT_CHUNK = 32  # tokens: a prefill step is made shorter than this only where nothing else helps
_CHUNK_SHARE = 8  # a chunk takes at most one part in so many of what it competes for with weights, or makes streamed
_STEPS = 8  # in which a budget grows until the head fits
TILE = 4 << 20  # bytes of a table in memory at once, twice (one in use, one on its way)
PROCESS = 7 << 20  # bytes that a process takes once it works: code, sockets, plans, hashes


@dataclass(frozen=True)
class Demand:
    """What one node must find room for. Bytes, but for `pages`."""

    blocks: tuple[int, ...]  # each block or tile, in order of use (`Extent.slot_bytes`)
    page_bytes: int  # one page of this node's heads, all layers (`tpi.kv.page_bytes`)
    pages: int  # asked for: the context, in pages
    token: int  # activations of one token of a step (`worker.plan.fit.token_bytes`)
    fixed: int = 0  # vectors, buffers that do not grow with a step
    head: int = 0  # the head's table; 0 on workers
    embedding: int = 0  # the embedding's table; 0 on workers, and where it is the head's
    kinds: tuple[BlockKind, ...] | None = None  # of `blocks`, as `scheduler.model.placement.kinds_of`

    @property
    def table_tiles(self) -> int:
        """Bytes for the head's two tiles and one unit of the embedding's rows, when both are on disk."""
        return min(2 * TILE, round_up(self.head)) + min(TILE, round_up(self.embedding))


@dataclass(frozen=True)
class Budget:
    """What fits: sizes in bytes, `chunk` in tokens."""

    total: int
    fixed: int
    pages: int
    kv_bytes: int
    chunk: int
    chunk_bytes: int
    head_bytes: int  # for `master.vocabulary.streamed`: the whole table, or its tiles
    embedding_bytes: int
    placement: Placement
    demand_bytes: int = 0  # for a cache of units that come when they are wanted

    @property
    def used(self) -> int:
        """Bytes that the node will use above its bare process: the predicted peak (proposition 5)."""
        other = self.fixed + self.kv_bytes + self.chunk_bytes + self.head_bytes + self.embedding_bytes
        return other + self.placement.memory_bytes + self.demand_bytes


def plan_budget(
    need: Demand, total: int, chunk: int = LONGEST_CHUNK, window: int = 0, retain: int = 0, speeds: Speeds | None = None
) -> Budget:
    """Fit `need` into `total` bytes.

    Args:
        chunk: the longest prefill step asked for, in tokens; it is never longer than the pages hold.
        window, retain: the paper's placement (`scheduler.model.placement.place_window`), not the fastest that fits.

    Raises:
        PlanError: if it does not fit; says the smallest budget that would do and the context that would fit.
    """
    if need.pages * need.page_bytes + minimum_bytes(need, window, retain) > total:
        raise _refusal(need, total, window, retain)
    chunk, head, room = _shares(need, total, chunk, window, retain)
    tiles = min(TILE, round_up(need.embedding))
    placement = _placed(need.blocks, room, need.kinds, window, retain, speeds)
    spare = room + tiles - placement.memory_bytes
    keep_embedding = not placement.streamed_bytes and round_up(need.embedding) <= spare
    return Budget(
        total=total,
        fixed=need.fixed,
        pages=need.pages,
        kv_bytes=need.pages * need.page_bytes,
        chunk=chunk,
        chunk_bytes=chunk * need.token,
        head_bytes=head,
        embedding_bytes=round_up(need.embedding) if keep_embedding else tiles,
        placement=placement,
    )


def minimum_bytes(need: Demand, window: int = 0, retain: int = 0) -> int:
    """The smallest budget that would do without any KV: one token a step, one block at a time."""
    return need.fixed + need.token + need.table_tiles + _least_weights(need, window, retain)[0]


def sufficient_budget(need: Demand, weights: int, chunk: int = LONGEST_CHUNK) -> int:
    """The smallest budget found of which `plan_budget` leaves `weights` bytes for blocks: bytes, whole MiB.

    More memory may first go to the head or to a longer chunk, so it grows until the blocks get theirs.
    """
    total = _whole_mib(minimum_bytes(need) + need.pages * need.page_bytes)
    while (room := _shares(need, total, chunk, 0, 0)[2]) < weights:
        total = _whole_mib(total + weights - room)
    return total


def window_budget(need: Demand, window: int, retain: int, chunk: int = LONGEST_CHUNK) -> int:
    """Return the smallest budget found with which this window runs beside a head in memory: bytes, whole MiB."""
    total = _whole_mib(minimum_bytes(need, window, retain) + need.pages * need.page_bytes)
    while (head := _shares(need, total, chunk, window, retain)[1]) < round_up(need.head):
        total += max(1 << 20, _whole_mib((round_up(need.head) - head) // _STEPS))
    return total


def headed_budget(need: Demand, weights: int, chunk: int = LONGEST_CHUNK) -> int:
    """Return the smallest budget found that leaves `weights` bytes for blocks beside a head in memory.

    Where `weights` are all blocks it also keeps the embedding.
    """
    total = sufficient_budget(need, weights, chunk)
    while (shares := _shares(need, total, chunk, 0, 0))[1] < round_up(need.head) or shares[2] < weights:
        total += max(1 << 20, _whole_mib((round_up(need.head) - shares[1]) // _STEPS))
    return total + (round_up(need.embedding) if weights >= sum(need.blocks) else 0)


def affordable_pages(need: Demand, total: int, window: int = 0, retain: int = 0) -> int:
    """Pages that would fit into `total` bytes if the rest took as little as it can; 0 if not even that fits."""
    room = total - minimum_bytes(need, window, retain)
    return max(0, room // need.page_bytes) if need.page_bytes else need.pages


def _shares(need: Demand, total: int, chunk: int, window: int, retain: int) -> tuple[int, int, int]:
    """Tokens of a prefill step, bytes for the head, and bytes left for blocks. Arguments as `plan_budget`."""
    chunk = min(chunk, need.pages * PAGE_TOKENS)
    left = total - need.fixed - need.pages * need.page_bytes
    weights = _least_weights(need, window, retain)
    chunk = _chunk(need, left - need.table_tiles, weights, chunk, 0 if window else sum(need.blocks) + need.head)
    left -= chunk * need.token
    head = _head(need, left, weights)
    return chunk, head, left - head - min(TILE, round_up(need.embedding))


def _least_weights(need: Demand, window: int, retain: int) -> tuple[int, int]:
    """Bytes that weights take at least, and that let loads overlap computing."""
    if window:
        needed = place_window(need.blocks, window, retain, need.kinds).memory_bytes
        return needed, needed
    return max(need.blocks, default=0), min(sum(need.blocks), neighbours(need.blocks, 2)) if need.blocks else 0


def _chunk(need: Demand, left: int, weights: tuple[int, int], longest: int, everything: int) -> int:
    """The longest prefill step, halved until it leaves weights enough (of `everything` that could stay): tokens.

    Each of its bytes is one more to stream per token. Where little is streamed that is much of it, and a further pass
    over so little costs a prompt next to nothing.
    """
    chunk = max(1, longest)
    while chunk > 1:
        size = chunk * need.token
        streamed = everything - (left - size)
        worth = chunk <= _AMPLE_CHUNK or streamed <= 0 or size <= streamed // _CHUNK_SHARE
        modest = worth and size <= left // _CHUNK_SHARE and size + weights[1] <= left
        if modest or (chunk <= _SHORT_CHUNK and size + weights[0] <= left):
            break
        chunk //= 2
    return chunk


def _head(need: Demand, left: int, weights: tuple[int, int]) -> int:
    """Bytes for the head: all of it if blocks can stream beside it (nothing hides its load), else its tiles."""
    whole = round_up(need.head)
    if whole + weights[1] + min(TILE, round_up(need.embedding)) <= left:
        return whole
    return min(2 * TILE, whole)


def _placed(
    blocks: Sequence[int],
    room: int,
    kinds: Sequence[BlockKind] | None,
    window: int,
    retain: int,
    speeds: Speeds | None,
) -> Placement:
    if window:
        return place_window(blocks, window, retain, kinds)
    return place(blocks, room // PAGE * PAGE, speeds)


def _refusal(need: Demand, total: int, window: int, retain: int) -> PlanError:
    smallest = round_up(minimum_bytes(need, window, retain) + need.pages * need.page_bytes)
    fitting = PAGE_TOKENS * affordable_pages(need, total, window, retain)
    context = f"a context of {fitting} tokens would fit" if fitting else "no context would fit"
    enough = f"--memory {_mib(smallest, up=True)} would do"
    return PlanError(
        f"{_mib(total)} of memory is too little for this part of the model: {enough}; at {_mib(total)} {context}",
        context=fitting,
    )


def _whole_mib(size: int) -> int:
    return -(-size >> 20) << 20


def _mib(size: int, up: bool = False) -> str:
    return f"{-(-size >> 20) if up else size >> 20}MiB"
